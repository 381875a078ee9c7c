"""ComfyUI's own page in a browser: opens workflows, runs them, takes images of the screen."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.fixtures.browser import open_browser

_READY = (
    "return Boolean(window.app?.graph && window.app?.extensionManager &&"
    " window.LiteGraph?.registered_node_types['MMAccelLoadModel'])"
)
_SETTINGS = {
    "Comfy.TutorialCompleted": True,  # else the page greets with its templates
    "Comfy.Minimap.Visible": False,
    "Comfy.Graph.CanvasInfo": False,
}


class Page:
    """A page of a running server.

    Args:
        url: of the server.
        profile: an empty folder for the browser.
    """

    def __init__(self, url: str, profile: Path) -> None:
        asked = urllib.request.Request(
            f"{url}/settings", json.dumps(_SETTINGS).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(asked).close()
        self.driver = open_browser(profile)
        self.driver.set_window_size(1500, 900)
        self.driver.set_script_timeout(120)
        self.driver.get(url)
        self._wait(_READY)

    def close(self) -> None:
        """End the browser."""
        self.driver.quit()

    def open(self, workflow: dict[str, Any], name: str) -> None:
        """Open a workflow, and show all of it."""
        self.call("await app.loadGraphData(given[0], true, true, given[1])", workflow, name)
        self.call("await app.extensionManager.command.execute('Comfy.Canvas.FitView')")

    def prompt(self) -> dict[str, Any]:
        """What the page would send to `POST /prompt`."""
        found: dict[str, Any] = self.call("return (await app.graphToPrompt()).output")
        return found

    def run(self) -> list[Any]:
        """Queue what is open, and wait for its end: the event's name, and what it says."""
        ended: list[Any] = self.call(
            "const ended = new Promise(done => {"
            " for (const name of ['execution_success', 'execution_error'])"
            " app.api.addEventListener(name, event => done([name, event.detail]), {once: true})});"
            "await app.queuePrompt(0);"
            "if (app.lastNodeErrors && Object.keys(app.lastNodeErrors).length)"
            " return ['refused', app.lastNodeErrors];"
            "return await ended"
        )
        return ended

    def boxes(self) -> dict[int, list[float]]:
        """Node -> left, top, width, height as they are drawn, titles included."""
        found = self.call(
            "const title = LiteGraph.NODE_TITLE_HEIGHT;"
            "return app.graph.nodes.map(n =>"
            " [n.id, n.pos[0], n.pos[1] - title, n.size[0], n.size[1] + title])"
        )
        return {int(number): box for number, *box in found}

    def sizes_shown(self, node: int) -> list[list[int]]:
        """Width and height of every image a node shows, once all are there."""
        count = f"const shown = app.graph.getNodeById({node}).imgs ?? [];"
        self._wait(f"{count} return shown.length > 0 && shown.every(i => i.naturalWidth > 0)")
        sizes: list[list[int]] = self.call(
            f"{count} return shown.map(i => [i.naturalWidth, i.naturalHeight])"
        )
        return sizes

    def preview(self, node: int) -> list[int]:
        """The colours of what a node shows while it runs: red, green, blue, ... of every pixel."""
        colours: list[int] = self.call(
            f"const url = app.nodePreviewImages[{node}]?.[0]; if (!url) return [];"
            "const image = new Image(); image.src = url; await image.decode();"
            "const canvas = new OffscreenCanvas(image.width, image.height);"
            "const brush = canvas.getContext('2d'); brush.drawImage(image, 0, 0);"
            "const all = brush.getImageData(0, 0, image.width, image.height).data;"
            "return Array.from(all).filter((_, k) => k % 4 != 3)"
        )
        return colours

    def save(self, file: Path) -> None:
        """Take an image of the screen."""
        self.call("app.canvas.draw(true, true)")
        time.sleep(1)  # the page fades messages in and out
        file.parent.mkdir(parents=True, exist_ok=True)
        assert self.driver.save_screenshot(str(file))

    def call(self, script: str, *given: Any) -> Any:
        """What an asynchronous function of the page returns; `given` are its arguments."""
        wrapped = (
            "const done = arguments[arguments.length - 1], given = arguments[0];"
            f"(async () => {{ {script} }})().then(value => done([true, value]),"
            " error => done([false, String(error)]))"
        )
        is_good, value = self.driver.execute_async_script(wrapped, list(given))
        assert is_good, value
        return value

    def _wait(self, script: str) -> None:
        for _ in range(600):
            if self.driver.execute_script(script):
                return
            time.sleep(0.1)
        raise AssertionError(f"the page did not get there: {script}")
