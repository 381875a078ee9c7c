"""The example workflows: written from the table, and right by rules of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmaccel.comfy.nodes import NODES
from scripts.update_comfy import KINDS, generated_files
from tests.architecture.source import ROOT

WORKFLOWS = ROOT / "mmaccel" / "comfy" / "pack" / "example_workflows"
PAGE = sorted(WORKFLOWS.glob("*.json"))
# what a ComfyUI lists in /object_info: inputs, then types of outputs
THEIRS = {
    "SaveImage": (["images", "filename_prefix"], []),
    "SaveAudio": (["audio", "filename_prefix"], []),
    "SaveVideo": (["video", "filename_prefix", "format", "codec"], []),
    "LoadImage": (["image"], ["IMAGE", "MASK"]),
    "PreviewAny": (["source"], []),
}


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def test_files_are_written_from_the_table() -> None:
    stale = [
        name
        for name, text in generated_files().items()
        if not (ROOT / name).is_file() or (ROOT / name).read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run scripts/update_comfy.py"
    assert [file.name for file in sorted(WORKFLOWS.glob("api/*"))] == [file.name for file in PAGE]
    for name, shape in THEIRS.items():
        ports = [each.name for each in KINDS[name].inputs]
        assert (ports, [each.kind for each in KINDS[name].outputs]) == shape


@pytest.mark.parametrize("file", PAGE, ids=lambda file: file.stem)
def test_links_join_types_and_values_are_allowed(file: Path) -> None:
    page, graph = read(file), read(WORKFLOWS / "api" / file.name)
    nodes = {node["id"]: node for node in page["nodes"]}
    for number, source, slot, target, place, type_ in page["links"]:
        output, link = nodes[source]["outputs"][slot], nodes[target]["inputs"][place]
        assert output["type"] == type_ and link["type"] in (type_, "*")
        assert number in output["links"] and link["link"] == number
        assert graph[str(target)]["inputs"][link["name"]] == [str(source), slot]
    for id, node in graph.items():
        kind, inputs = node["class_type"], dict(node["inputs"])
        links = [inputs.pop(name) for name in list(inputs) if isinstance(inputs[name], list)]
        needed = [each for each in KINDS[kind].links if not each.is_optional]
        assert len(needed) <= len(links) and len(inputs) == len(KINDS[kind].widgets)
        shown = [value for value in nodes[int(id)]["widgets_values"] if value != "fixed"]
        assert shown == list(inputs.values()) and nodes[int(id)]["type"] == kind
        assert kind not in NODES or NODES[kind].refusal(inputs) is None
    assert len(page["links"]) == sum(
        isinstance(value, list) for node in graph.values() for value in node["inputs"].values()
    )
