"""ComfyUI's own page on a real server: it reads the workflows, runs them and shows the images.

MMACCEL_SCREENSHOTS names a folder for images of the screen; `scripts/update_comfy_images.sh`
takes those of the documentation.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.comfy.comfy_server import HOME, PYTHON, WORKFLOWS, make_base, running
from tests.comfy.page import Page

pytestmark = pytest.mark.skipif(not HOME, reason="COMFYUI_PATH names no ComfyUI")
FILES = sorted(WORKFLOWS.glob("*.json"))
GREY = [128, 128, 128]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    asked = [PYTHON, "-c", "import comfyui_frontend_package"]
    if subprocess.run(asked, capture_output=True, check=False).returncode:
        pytest.skip("needs comfyui-frontend-package in the Python of ComfyUI")
    with running(make_base(tmp_path_factory.mktemp("page") / "base")) as url:
        opened = Page(url, tmp_path_factory.mktemp("profile"))
        try:
            yield opened
        finally:
            opened.close()


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "saving"),
    [("mmaccel_text_to_image", 2), ("mmaccel_generate", 4), ("mmaccel_compare", 4)],
)
def test_an_image_of_the_screen(name: str, saving: int, page: Page, tmp_path: Path) -> None:
    """As it is shown in docs/comfyui.md: the workflow as it is, with what it made."""
    folder = Path(os.environ.get("MMACCEL_SCREENSHOTS") or tmp_path)
    page.open(read(WORKFLOWS / f"{name}.json"), name)
    page.save(tmp_path / "before.png")
    said, data = page.run()
    assert said == "execution_success", data
    page.sizes_shown(saving)
    file = folder / f"{name.replace('mmaccel_', 'comfyui-').replace('_', '-')}.png"
    page.save(file)
    with Image.open(file) as after, Image.open(tmp_path / "before.png") as before:
        assert after.size == before.size and after.width >= 1400
        assert count_vivid(after) > count_vivid(before) + 1000
    if folder == tmp_path:
        assert file.stat().st_size < 400_000


def count_vivid(image: Image.Image) -> int:
    """Pixels in strong red or yellow, which the images have and the page has not."""
    pixels = image.convert("RGB").get_flattened_data()
    return sum(r > 180 and b < 90 and r - b > 120 for r, _, b in pixels)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_page_reads_a_workflow_as_the_other_format_says(file: Path, page: Page) -> None:
    page.open(read(file), file.stem)
    sent, wanted = page.prompt(), read(WORKFLOWS / "api" / file.name)
    assert set(sent) == set(wanted)
    for number, node in wanted.items():
        assert sent[number]["class_type"] == node["class_type"]
        ours = sent[number]["inputs"]
        if node["class_type"].startswith("MMAccel"):
            assert ours == node["inputs"]  # every widget has the value it is meant to have
        assert {name: ours.get(name) for name in node["inputs"]} == node["inputs"]


@pytest.mark.parametrize(
    ("name", "sizes"), [("mmaccel_generate", [[64, 64]] * 2), ("mmaccel_compare", None)]
)
def test_a_run_shows_its_images(
    name: str, sizes: list[list[int]] | None, page: Page, tmp_path: Path
) -> None:
    """Nothing lies on anything else once all is there, and no preview is left unfinished."""
    workflow = read(WORKFLOWS / f"{name}.json")
    # token by token for long enough that a preview is drawn on the way
    workflow["nodes"][1]["widgets_values"][0] = 2
    page.open(workflow, name)
    said, data = page.run()
    assert said == "execution_success", data
    shown = page.sizes_shown(4)
    assert shown == sizes if sizes else len(shown) == 1 and shown[0][0] > 2 * 240
    colours = page.preview(3)
    last = [colours[k : k + 3] for k in range(len(colours) - 3 * 64, len(colours), 3)]
    assert last and last.count(GREY) < len(last)  # the last row would be grey throughout
    boxes = list(page.boxes().values())
    for i, (x, y, w, h) in enumerate(boxes):
        for a, b, c, d in boxes[i + 1 :]:
            assert x + w <= a or a + c <= x or y + h <= b or b + d <= y, boxes
