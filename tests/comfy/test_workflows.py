"""The example workflows: written from the table, and right by rules of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.table import Widget
from mmaccel.comfy.values import refusal
from scripts.update_comfy import generated_files
from tests.architecture.source import ROOT

WORKFLOWS = ROOT / "mmaccel" / "comfy" / "pack" / "example_workflows"
API = sorted((WORKFLOWS / "api").glob("*.json"))
PAGE = sorted(WORKFLOWS.glob("*.json"))
# what a ComfyUI 0.8 lists in /object_info: inputs, then outputs
THEIRS: dict[str, tuple[dict[str, str], list[str]]] = {
    "SaveImage": ({"images": "IMAGE", "filename_prefix": "text"}, []),
    "SaveAudio": ({"audio": "AUDIO", "filename_prefix": "text"}, []),
    "SaveVideo": (
        {"video": "VIDEO", "filename_prefix": "text", "format": "text", "codec": "text"},
        [],
    ),
    "LoadImage": ({"image": "text"}, ["IMAGE", "MASK"]),
    "PreviewAny": ({"source": "*"}, []),
}


def shape_of(name: str) -> tuple[dict[str, str], list[str]]:
    """Inputs (name -> kind) and kinds of outputs."""
    if name in THEIRS:
        return THEIRS[name]
    spec = NODES[name]
    return {e.name: e.kind for e in spec.inputs}, [output.kind for output in spec.outputs]


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def test_files_are_written_from_the_table() -> None:
    stale = [
        name
        for name, text in generated_files().items()
        if not (ROOT / name).is_file() or (ROOT / name).read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run scripts/update_comfy.py"
    assert [f.name for f in API] == [f.name for f in PAGE] and len(API) >= 5


@pytest.mark.parametrize("file", API, ids=lambda f: f.stem)
def test_api_format(file: Path) -> None:
    graph = read(file)
    for node in graph.values():
        inputs, _ = shape_of(node["class_type"])
        optional = {
            s.name for s in getattr(NODES.get(node["class_type"]), "sockets", ()) if s.is_optional
        }
        assert set(inputs) - optional <= set(node["inputs"]) <= set(inputs)
        for name, value in node["inputs"].items():
            if isinstance(value, list):
                source, slot = value
                made = shape_of(graph[source]["class_type"])[1][slot]
                assert inputs[name] in (made, "*"), (node["class_type"], name)
        spec = NODES.get(node["class_type"])
        if spec is not None:
            values = {k: v for k, v in node["inputs"].items() if not isinstance(v, list)}
            assert refusal(spec, values) is None
    saving = ("SaveImage", "SaveAudio", "SaveVideo")
    assert any(node["class_type"] in saving for node in graph.values())


@pytest.mark.parametrize("file", PAGE, ids=lambda f: f.stem)
def test_format_of_the_page(file: Path) -> None:
    page, graph = read(file), read(WORKFLOWS / "api" / file.name)
    nodes = {node["id"]: node for node in page["nodes"]}
    assert page["version"] == 0.4 and len(nodes) == len(page["nodes"]) == page["last_node_id"]
    seen = set()
    for number, source, slot, target, place, kind in page["links"]:
        assert number not in seen and number <= page["last_link_id"]
        seen.add(number)
        output, socket = nodes[source]["outputs"][slot], nodes[target]["inputs"][place]
        assert output["type"] == kind and socket["type"] in (kind, "*")
        assert number in output["links"] and socket["link"] == number
        assert graph[str(target)]["inputs"][socket["name"]] == [str(source), slot]
    listed = [link for node in nodes.values() for o in node["outputs"] for link in o["links"]]
    assert sorted(listed) == sorted(seen)
    for node in nodes.values():
        inputs, outputs = shape_of(node["type"])
        assert [output["type"] for output in node["outputs"]] == outputs
        sockets = [name for name, kind in inputs.items() if kind.isupper() or kind == "*"]
        assert [socket["name"] for socket in node["inputs"]] == sockets
        shown = [name for name in inputs if name not in sockets]
        shown = [part for name in shown for part in ([name, None] if name == "seed" else [name])]
        values = dict(zip(shown, node["widgets_values"], strict=True))
        values.pop(None, None)
        mine = {k: v for k, v in graph[str(node["id"])]["inputs"].items() if k in values}
        assert values == mine and node["type"] == graph[str(node["id"])]["class_type"]


@pytest.mark.parametrize("file", PAGE, ids=lambda f: f.stem)
def test_nodes_do_not_lie_on_each_other(file: Path) -> None:
    boxes = [(*node["pos"], *node["size"]) for node in read(file)["nodes"]]
    for i, (x, y, w, h) in enumerate(boxes):
        for a, b, c, d in boxes[i + 1 :]:
            assert x + w <= a or a + c <= x or y + h <= b or b + d <= y


def test_our_own_nodes_have_no_capital_widget_kinds() -> None:
    """`test_format_of_the_page` tells sockets from widgets by this."""
    for spec in NODES.values():
        assert all(e.kind.islower() for e in spec.inputs if isinstance(e, Widget))
        assert all(socket.kind.isupper() for socket in spec.sockets)
