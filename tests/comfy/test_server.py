"""A real ComfyUI over HTTP.

It runs where COMFYUI_PATH names the folder of one (0.27 was used), in the Python that
COMFYUI_PYTHON names, which has what ComfyUI and mmaccel need.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmaccel.cli import main
from mmaccel.comfy.nodes import NODES
from tests.comfy.comfy_server import HOME, WORKFLOWS, ask, read_graph, running
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HOME, reason="COMFYUI_PATH names no ComfyUI"),
]
Graph = dict[str, Any]


@pytest.fixture
def _close_sockets() -> None:
    """The server is asked over the network of this machine."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pack") / "base"


@pytest.fixture(scope="module")
def url(base: Path) -> Iterator[str]:
    with running(base) as address:
        yield address


def run(url: str, graph: Graph, *, interrupt: bool = False) -> Any:
    """What the history says of a graph: how it ended with what message, and its outputs."""
    number = ask(f"{url}/prompt", {"prompt": graph})["prompt_id"]
    while interrupt and not ask(f"{url}/queue")["queue_running"]:
        time.sleep(0.05)
    if interrupt:
        time.sleep(1)
        ask(f"{url}/interrupt", {})
    for _ in range(1000):
        found = ask(f"{url}/history/{number}")
        if found:
            messages = found[number]["status"]["messages"]
            return messages[-1][0], dict(messages), found[number]["outputs"]
        time.sleep(0.1)
    raise AssertionError("no end after 100 seconds")


def tiny(name: str, model: Path | str, **values: Any) -> Graph:
    """An example workflow with a tiny model."""
    graph = read_graph(name)
    graph["1"]["inputs"]["model"] = str(model)
    graph["3" if "3" in graph else "1"]["inputs"] |= values
    return graph


def pixels(base: Path, outputs: Any, node: str) -> list[np.ndarray]:
    """The images that a node saved."""
    files = [base / "output" / image["filename"] for image in outputs[node]["images"]]
    return [np.asarray(Image.open(file)) for file in files]


def test_every_node_is_listed_and_the_templates_too(url: str, base: Path) -> None:
    info = ask(f"{url}/object_info")
    for id, node in NODES.items():
        groups = info[id]["input"]
        inputs = {**groups.get("required", {}), **groups.get("optional", {})}
        assert set(inputs) == {port.name for port in node.inputs}
        assert info[id]["display_name"] == node.title
        assert info[id]["output"] == [port.kind for port in node.outputs]
    assert "IMPORT FAILED: mmaccel" not in (base / "server.log").read_text(encoding="utf-8")
    names = {file.stem for file in WORKFLOWS.glob("*.json")}
    assert set(ask(f"{url}/workflow_templates")["mmaccel-nodes"]) == names


def test_workflows_make_the_command_lines_pixels(
    url: str, base: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    asked = {"prompt": CAPTIONS[0], "seed": 11, "num_images": 2}
    graph = tiny("mmaccel_generate", tiny_folder, **asked)
    end, _, outputs = run(url, graph)
    again = run(url, graph)[1]
    inner = tiny("mmaccel_text_to_image", tiny_folder, policy="jacobi", **asked)
    inner["1"]["inputs"].pop("negative_prompt")  # it is optional
    arguments = ["generate", CAPTIONS[0], "-n", "2", "--seed", "11"]
    assert main([*arguments, "--model", str(tiny_folder), "--out", str(tmp_path)]) == 0
    wanted = [np.asarray(Image.open(file)) for file in sorted(tmp_path.glob("0*.png"))]
    assert end == "execution_success"
    assert np.array_equal(pixels(base, outputs, "4"), wanted)
    assert f"seed 12: {N_TOKENS} tokens in" in outputs["5"]["text"][0]
    assert set(again["execution_cached"]["nodes"]) >= {"1", "2", "3"}  # nothing is made twice
    assert np.array_equal(pixels(base, run(url, inner)[2], "2"), wanted)


def test_a_bad_value_is_refused_before_anything_runs(url: str, tiny_folder: Path) -> None:
    window = tiny("mmaccel_generate", tiny_folder)
    window["2"]["inputs"]["window"] = 5000
    wrong = tiny("mmaccel_generate", tiny_folder)
    wrong["3"]["inputs"]["policy"] = ["1", 0]
    for graph, node, said in (
        (window, "2", "window: expected an integer in 0..4096"),
        (tiny("mmaccel_generate", tiny_folder, top_p=1.5), "3", "top_p: expected a number"),
        (tiny("mmaccel_generate", "none"), "1", "model: expected a folder, a file, an id"),
        (wrong, "3", "received_type(MMACCEL_MODEL) mismatch input_type(MMACCEL_POLICY)"),
    ):
        errors = ask(f"{url}/prompt", {"prompt": graph})["node_errors"][node]["errors"]
        assert any(said in error["details"] for error in errors), errors


def test_an_interrupt_ends_the_run_and_the_next_one_runs(
    url: str, base: Path, tiny_folder: Path
) -> None:
    slow = tiny("mmaccel_generate", "scenes", prompt="a red circle on grass", num_images=64)
    slow["2"] = {"class_type": "MMAccelAutoregressivePolicy", "inputs": {}}
    before = set((base / "output").iterdir())
    end, messages, outputs = run(url, slow, interrupt=True)
    assert (end, messages[end]["node_id"], outputs) == ("execution_interrupted", "3", {})
    assert set((base / "output").iterdir()) == before
    after = tiny("mmaccel_generate", tiny_folder, prompt=CAPTIONS[0], seed=5)
    assert run(url, after)[0] == "execution_success"
