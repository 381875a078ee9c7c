"""Write what is made from the table of nodes: example workflows in ComfyUI's two file formats, and
the table in docs/comfyui.md; with --check, only compare.

The API format is what `POST /prompt` takes; the other one is what the page opens and saves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.table import AUDIO, IMAGE, VIDEO, NodeSpec, Output, Socket, Widget
from mmaccel.errors import OptionError

ROOT = Path(__file__).resolve().parent.parent
_PAGE = "docs/comfyui.md"
_FOLDER = "mmaccel/comfy/pack/example_workflows"
_BEGIN, _END = "<!-- nodes -->\n", "<!-- end nodes -->"
_WIDE, _GAP, _HEAD, _SLOT, _WIDGET, _TEXT = 320, 60, 40, 20, 24, 70  # pixels on the page
_AFTER_SEED = "fixed"  # what the page does with a seed after a run


@dataclass(frozen=True)
class WorkflowNode:
    """A node in a workflow.

    Attributes:
        id: a node of `NODES` or `OTHERS`.
        column: on the page, from the left.
        values: of widgets that are not their defaults.
        links: input -> (index of a node in the workflow, name of its output).
        extra_height: pixels below its widgets, for what a run shows there.
        width: pixels.
    """

    id: str
    column: int
    values: Mapping[str, Any] = field(default_factory=dict)
    links: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    extra_height: int = 0
    width: int = _WIDE

    @property
    def height(self) -> int:
        """Pixels, without its title."""
        spec = spec_of(self.id)
        slots = _SLOT * max(len(spec.sockets), len(spec.outputs))
        widgets = _WIDGET * (len(spec.widgets) + any(widget.is_seed for widget in spec.widgets))
        text = _TEXT * sum(widget.is_multiline for widget in spec.widgets)
        return _HEAD + slots + widgets + text + self.extra_height


def _other(name: str, *inputs: Widget | Socket, outputs: tuple[Output, ...] = ()) -> NodeSpec:
    def nothing(*_: Any, **__: Any) -> Any:
        raise OptionError(f"{name}: expected ComfyUI to run its own node; use a workflow's file")

    return NodeSpec(name, "", "", inputs, outputs, nothing, nothing, is_output=not outputs)


OTHERS: dict[str, NodeSpec] = {  # nodes every ComfyUI has
    spec.id: spec
    for spec in (
        _other(
            "SaveImage",
            Socket("images", IMAGE, ""),
            Widget("filename_prefix", "text", "mmaccel", ""),
        ),
        _other(
            "SaveAudio",
            Socket("audio", AUDIO, ""),
            Widget("filename_prefix", "text", "mmaccel", ""),
        ),
        _other(
            "SaveVideo",
            Socket("video", VIDEO, ""),
            Widget("filename_prefix", "text", "mmaccel", ""),
            Widget("format", "text", "auto", ""),
            Widget("codec", "text", "auto", ""),
        ),
        _other(
            "LoadImage",
            Widget("image", "text", "example.png", ""),
            outputs=(Output("IMAGE", IMAGE, ""), Output("MASK", "MASK", "")),
        ),
        _other("PreviewImage", Socket("images", IMAGE, "")),
        _other("PreviewAny", Socket("source", "*", "")),
    )
}


def spec_of(name: str) -> NodeSpec:
    """The node of an id, from `NODES` or `OTHERS`."""
    return NODES.get(name) or OTHERS[name]


def to_api(workflow: Sequence[WorkflowNode]) -> dict[str, Any]:
    """The API format; nodes are numbered from 1."""
    graph: dict[str, Any] = {}
    for number, entry in enumerate(workflow, 1):
        spec = spec_of(entry.id)
        inputs: dict[str, Any] = {**spec.defaults(), **entry.values}
        for name, (index, output) in entry.links.items():
            inputs[name] = [str(index + 1), _slot(workflow[index], output)]
        meta = {"title": spec.title or entry.id}
        graph[str(number)] = {"inputs": inputs, "class_type": entry.id, "_meta": meta}
    return graph


def to_page(workflow: Sequence[WorkflowNode]) -> dict[str, Any]:
    """The format of the page (version 0.4); nodes and links are numbered from 1."""
    links: list[list[Any]] = []
    nodes: list[dict[str, Any]] = []
    below: dict[int, int] = {}  # column -> where the next node of it begins
    for number, entry in enumerate(workflow, 1):
        spec = spec_of(entry.id)
        left = sum(
            max(u.width for u in workflow if u.column == k) + _GAP for k in range(entry.column)
        )
        top = below.get(entry.column, _GAP)
        below[entry.column] = top + entry.height + _GAP
        nodes.append(
            {
                "id": number,
                "type": entry.id,
                "pos": [_GAP + left, top],
                "size": [entry.width, entry.height],
                "flags": {},
                "order": number - 1,
                "mode": 0,
                "inputs": [_socket(s) for s in spec.sockets],
                "outputs": [{"name": o.name, "type": o.kind, "links": []} for o in spec.outputs],
                "properties": {"Node name for S&R": entry.id},
                "widgets_values": _widget_values(spec, entry),
            }
        )
    for number, entry in enumerate(workflow, 1):
        for name, (index, output) in entry.links.items():
            socket = next(e for e in nodes[number - 1]["inputs"] if e["name"] == name)
            slot = _slot(workflow[index], output)
            kind = spec_of(workflow[index].id).outputs[slot].kind
            index_in = nodes[number - 1]["inputs"].index(socket)
            links.append([len(links) + 1, index + 1, slot, number, index_in, kind])
            socket["link"] = len(links)
            nodes[index]["outputs"][slot]["links"].append(len(links))
    return {
        "last_node_id": len(nodes),
        "last_link_id": len(links),
        "nodes": nodes,
        "links": links,
        "groups": [],
        "config": {},
        "extra": {},
        "version": 0.4,
    }


def _socket(socket: Socket) -> dict[str, Any]:
    shape = {"shape": 7} if socket.is_optional else {}  # drawn hollow
    return {"name": socket.name, "type": socket.kind, "link": None, **shape}


def _widget_values(spec: NodeSpec, entry: WorkflowNode) -> list[Any]:
    """Values in the order of the page, which shows one more widget below a seed."""
    shown: list[Any] = []
    for widget in spec.widgets:
        shown.append(entry.values.get(widget.name, widget.default))
        shown += [_AFTER_SEED] if widget.is_seed else []
    return shown


def _slot(entry: WorkflowNode, output: str) -> int:
    outputs: tuple[Output, ...] = spec_of(entry.id).outputs
    return [o.name for o in outputs].index(output)


_LOAD, _POLICY = WorkflowNode("MMAccelLoadModel", 0), WorkflowNode("MMAccelJacobiPolicy", 0)
_INPUTS = {"model": (0, "model"), "policy": (1, "policy")}
_STATS = (
    WorkflowNode("MMAccelStats", 2, links={"stats": (2, "stats")}),
    WorkflowNode("PreviewAny", 3, links={"source": (4, "text")}, extra_height=260, width=560),
)
_PROMPTS = "a red circle above a small blue square on grass\na large yellow star at night"

EXAMPLES: dict[str, tuple[WorkflowNode, ...]] = {
    "mmaccel_text_to_image": (
        WorkflowNode("MMAccelTextToImage", 0, {"seed": 7}, extra_height=220),
        WorkflowNode("SaveImage", 1, links={"images": (0, "images")}, extra_height=220),
    ),
    "mmaccel_generate": (
        _LOAD,
        _POLICY,
        WorkflowNode(
            "MMAccelGenerateImage", 1, {"prompt": _PROMPTS, "seed": 7}, _INPUTS, extra_height=220
        ),
        WorkflowNode("SaveImage", 2, links={"images": (2, "images")}, extra_height=220),
        *_STATS,
    ),
    "mmaccel_compare": (
        _LOAD,
        _POLICY,
        WorkflowNode(
            "MMAccelCompare", 1, {"prompt": _PROMPTS, "seed": 7}, _INPUTS, extra_height=220
        ),
        WorkflowNode(
            "SaveImage",
            2,
            {"filename_prefix": "mmaccel_compare"},
            {"images": (2, "sheet")},
            extra_height=320,
            width=560,
        ),
        *_STATS,
    ),
    "mmaccel_canvas": (
        WorkflowNode("MMAccelLoadModel", 0, {"model": "scenes-masked"}),
        WorkflowNode("MMAccelLosslessUnmaskPolicy", 0),
        WorkflowNode("MMAccelGenerateImage", 1, {"seed": 7}, _INPUTS, extra_height=220),
        WorkflowNode("SaveImage", 2, links={"images": (2, "images")}, extra_height=220),
        *_STATS,
    ),
    "mmaccel_speech": (
        WorkflowNode("MMAccelLoadSpeechModel", 0),
        _POLICY,
        WorkflowNode(
            "MMAccelGenerateSpeech",
            1,
            {"seed": 7},
            {"speech_model": (0, "speech_model"), "policy": (1, "policy")},
        ),
        WorkflowNode("SaveAudio", 2, links={"audio": (2, "audio")}, extra_height=120),
        *_STATS,
    ),
    "mmaccel_text_to_video": (
        WorkflowNode("MMAccelLoadTextToVideoModel", 0),
        _POLICY,
        WorkflowNode(
            "MMAccelTextToVideo",
            1,
            {"seed": 7},
            {"text_to_video_model": (0, "text_to_video_model"), "policy": (1, "policy")},
        ),
        WorkflowNode("SaveVideo", 2, links={"video": (2, "video")}, extra_height=320),
        *_STATS,
    ),
    "mmaccel_video": (
        WorkflowNode("MMAccelLoadVideoModel", 0),
        _POLICY,
        WorkflowNode(
            "MMAccelGenerateVideo",
            1,
            {"seed": 7},
            {"video_model": (0, "video_model"), "policy": (1, "policy"), "start": (6, "IMAGE")},
        ),
        WorkflowNode("SaveVideo", 2, links={"video": (2, "video")}, extra_height=320),
        *_STATS,
        WorkflowNode("LoadImage", 0, extra_height=320),
    ),
    "mmaccel_answer": (
        WorkflowNode("MMAccelLoadVisionModel", 0),
        _POLICY,
        WorkflowNode(
            "MMAccelAnswerQuestion",
            1,
            links={
                "vision_model": (0, "vision_model"),
                "image": (6, "IMAGE"),
                "policy": (1, "policy"),
                "visual_tokens": (7, "visual_tokens"),
            },
        ),
        WorkflowNode("SaveImage", 2, links={"images": (2, "kept")}, extra_height=320, width=560),
        *_STATS,
        WorkflowNode("LoadImage", 0, extra_height=320),
        WorkflowNode("MMAccelVisualTokens", 0),
        WorkflowNode("PreviewAny", 2, links={"source": (2, "text")}, extra_height=60),
    ),
}


def generated_files() -> dict[str, str]:
    """Path below `ROOT` -> the text that the file must hold."""
    files = {}
    for name, workflow in EXAMPLES.items():
        files[f"{_FOLDER}/{name}.json"] = _to_json(to_page(workflow))
        # ComfyUI lists files of the folder itself as templates, which these are not.
        files[f"{_FOLDER}/api/{name}.json"] = _to_json(to_api(workflow))
    page = (ROOT / _PAGE).read_text(encoding="utf-8")
    head, rest = page.split(_BEGIN)
    files[_PAGE] = head + _BEGIN + node_table() + _END + rest.split(_END)[1]
    return files


def node_table() -> str:
    """The nodes as a Markdown table."""
    lines = ["| node | inputs | outputs | what |", "| --- | --- | --- | --- |"]
    for spec in NODES.values():
        outputs = ", ".join(f"`{output.name}`" for output in spec.outputs)
        lines.append(f"| `{spec.id}` | {_inputs(spec)} | {outputs} | {spec.summary} |")
    return "\n".join(lines) + "\n"


def _inputs(spec: NodeSpec) -> str:
    return ", ".join(f"`{entry.name}`" for entry in spec.inputs) or "–"


def _to_json(value: object) -> str:
    return json.dumps(value, indent=1) + "\n"


def main() -> int:
    """Returns 1 if `--check` found a file that differs."""
    stale = []
    for name, text in generated_files().items():
        file = ROOT / name
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
    print(*stale, sep="\n")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
