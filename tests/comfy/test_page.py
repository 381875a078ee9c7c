"""ComfyUI's own page in a browser on a real server: it reads the workflows, runs them and shows the
images.

MMACCEL_SCREENSHOTS names a folder for images of the screen; `scripts/update_comfy_images.sh`
takes those of the documentation.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.comfy.comfy_server import HOME, PYTHON, WORKFLOWS, ask, read_graph, running
from tests.fixtures.browser import open_browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HOME, reason="COMFYUI_PATH names no ComfyUI"),
]
FILES = sorted(WORKFLOWS.glob("*.json"))
_READY = (
    "return Boolean(window.app?.graph && window.app?.extensionManager &&"
    " window.LiteGraph?.registered_node_types['MMAccelLoadModel'])"
)
_SETTINGS = {
    "Comfy.TutorialCompleted": True,  # else the page greets with its templates
    "Comfy.Minimap.Visible": False,
    "Comfy.Graph.CanvasInfo": False,
}
_RUN = """
const ended = new Promise(done => {
  for (const name of ['execution_success', 'execution_error'])
    app.api.addEventListener(name, event => done([name, event.detail]), {once: true})});
await app.queuePrompt(0);
const refused = app.lastNodeErrors && Object.keys(app.lastNodeErrors).length;
return refused ? ['refused', app.lastNodeErrors] : await ended
"""
_BOXES = """
const title = LiteGraph.NODE_TITLE_HEIGHT;
return app.graph.nodes.map(n => [n.pos[0], n.pos[1] - title, n.size[0], n.size[1] + title])
"""
_SHOWN = """
const shown = app.graph.getNodeById(given[0]).imgs ?? [];
return shown.every(i => i.naturalWidth) ? shown.map(i => [i.naturalWidth, i.naturalHeight]) : []
"""


Page = Callable[..., Any]
"""What an asynchronous function of the page returns, by its body; `given` are its arguments."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    asked = [PYTHON, "-c", "import comfyui_frontend_package"]
    if subprocess.run(asked, capture_output=True, check=False).returncode:
        pytest.skip("needs comfyui-frontend-package in the Python of ComfyUI")
    with running(tmp_path_factory.mktemp("page") / "base") as url:
        ask(f"{url}/settings", _SETTINGS)
        driver = open_browser(tmp_path_factory.mktemp("profile"))

        def call(script: str, *given: Any) -> Any:
            wrapped = (
                "const done = arguments[arguments.length - 1], given = arguments[0];"
                f"(async () => {{ {script} }})().then(value => done([true, value]),"
                " error => done([false, String(error)]))"
            )
            is_good, value = driver.execute_async_script(wrapped, list(given))
            assert is_good, value
            return value

        try:
            driver.set_window_size(1500, 900)
            driver.set_script_timeout(120)
            driver.get(url)
            wait(lambda: driver.execute_script(_READY))
            call.save = driver.save_screenshot  # type: ignore[attr-defined]
            yield call
        finally:
            driver.quit()


def wait(ask: Callable[[], Any]) -> Any:
    """An answer that is not empty."""
    for _ in range(600):
        if found := ask():
            return found
        time.sleep(0.1)
    raise AssertionError("the page did not get there")


def open_workflow(page: Page, name: str) -> None:
    """Open a workflow, and show all of it."""
    workflow = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
    page("await app.loadGraphData(given[0], true, true, given[1])", workflow, name)
    page("await app.extensionManager.command.execute('Comfy.Canvas.FitView')")


@pytest.mark.parametrize(
    ("name", "saving"),
    [("mmaccel_text_to_image", 2), ("mmaccel_generate", 4), ("mmaccel_compare", 4)],
)
def test_an_image_of_the_screen(name: str, saving: int, page: Page, tmp_path: Path) -> None:
    """As it is shown in docs/comfyui.md: the workflow as it is, with what it made."""
    open_workflow(page, name)
    said, data = page(_RUN)
    assert said == "execution_success", data
    shown = wait(lambda: page(_SHOWN, saving))
    sizes = {"mmaccel_text_to_image": [[64, 64]], "mmaccel_generate": [[64, 64]] * 2}
    assert shown == sizes.get(name, shown) and shown[0][0] >= 64
    boxes = page(_BOXES)  # nothing lies on anything else once all is there
    for i, (x, y, w, h) in enumerate(boxes):
        for a, b, c, d in boxes[i + 1 :]:
            assert x + w <= a or a + c <= x or y + h <= b or b + d <= y, boxes
    page("app.canvas.draw(true, true)")
    time.sleep(1)  # the page fades messages in and out
    folder = Path(os.environ.get("MMACCEL_SCREENSHOTS") or tmp_path)
    file = folder / f"{name.replace('mmaccel_', 'comfyui-').replace('_', '-')}.png"
    assert page.save(str(file))  # type: ignore[attr-defined]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_page_reads_a_workflow_as_the_other_format_says(file: Path, page: Page) -> None:
    open_workflow(page, file.stem)
    sent = page("return (await app.graphToPrompt()).output")
    wanted = read_graph(file.stem)
    assert set(sent) == set(wanted)
    for number, node in wanted.items():
        assert sent[number]["class_type"] == node["class_type"]
        ours = sent[number]["inputs"]
        if node["class_type"].startswith("MMAccel"):
            assert ours == node["inputs"]  # every widget has the value it is meant to have
        assert {name: ours.get(name) for name in node["inputs"]} == node["inputs"]
