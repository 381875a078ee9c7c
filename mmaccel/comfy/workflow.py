"""Workflows in ComfyUI's two file formats, from a short description of their nodes.

The API format is what `POST /prompt` takes; the other one is what the page opens and saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.table import AUDIO, IMAGE, VIDEO, NodeSpec, Output, Socket, Widget
from mmaccel.errors import OptionError

_WIDE, _GAP, _HEAD, _SLOT, _LINE, _TEXT = 320, 60, 40, 20, 24, 70  # pixels on the page
_AFTER_SEED = "fixed"  # what the page does with a seed once a run is over


@dataclass(frozen=True)
class Use:
    """A node in a workflow.

    Attributes:
        id: a node of ours or one of `OTHERS`.
        column: where it stands, from the left.
        values: of widgets that are not their defaults.
        links: input -> (index of a node in the workflow, name of its output).
        room: pixels below its widgets, for what a run shows there.
        width: pixels.
    """

    id: str
    column: int
    values: Mapping[str, Any] = field(default_factory=dict)
    links: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    room: int = 0
    width: int = _WIDE

    @property
    def height(self) -> int:
        """Pixels, its title left out."""
        spec = spec_of(self.id)
        slots = _SLOT * max(len(spec.sockets), len(spec.outputs))
        lines = _LINE * (len(spec.widgets) + any(widget.is_seed for widget in spec.widgets))
        text = _TEXT * sum(widget.is_multiline for widget in spec.widgets)
        return _HEAD + slots + lines + text + self.room


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
    """A node of ours, or one of `OTHERS`."""
    return NODES.get(name) or OTHERS[name]


def to_api(uses: Sequence[Use]) -> dict[str, Any]:
    """The API format; nodes are numbered from 1."""
    graph: dict[str, Any] = {}
    for number, use in enumerate(uses, 1):
        spec = spec_of(use.id)
        inputs: dict[str, Any] = {**spec.defaults(), **use.values}
        for name, (index, output) in use.links.items():
            inputs[name] = [str(index + 1), _slot(uses[index], output)]
        meta = {"title": spec.title or use.id}
        graph[str(number)] = {"inputs": inputs, "class_type": use.id, "_meta": meta}
    return graph


def to_page(uses: Sequence[Use]) -> dict[str, Any]:
    """The format of the page (version 0.4); nodes and links are numbered from 1."""
    links: list[list[Any]] = []
    nodes: list[dict[str, Any]] = []
    below: dict[int, int] = {}  # column -> where the next node of it begins
    for number, use in enumerate(uses, 1):
        spec = spec_of(use.id)
        left = sum(max(u.width for u in uses if u.column == k) + _GAP for k in range(use.column))
        top = below.get(use.column, _GAP)
        below[use.column] = top + use.height + _GAP
        nodes.append(
            {
                "id": number,
                "type": use.id,
                "pos": [_GAP + left, top],
                "size": [use.width, use.height],
                "flags": {},
                "order": number - 1,
                "mode": 0,
                "inputs": [_socket(s) for s in spec.sockets],
                "outputs": [{"name": o.name, "type": o.kind, "links": []} for o in spec.outputs],
                "properties": {"Node name for S&R": use.id},
                "widgets_values": _widget_values(spec, use),
            }
        )
    for number, use in enumerate(uses, 1):
        for name, (index, output) in use.links.items():
            socket = next(e for e in nodes[number - 1]["inputs"] if e["name"] == name)
            slot = _slot(uses[index], output)
            kind = spec_of(uses[index].id).outputs[slot].kind
            place = nodes[number - 1]["inputs"].index(socket)
            links.append([len(links) + 1, index + 1, slot, number, place, kind])
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


def _widget_values(spec: NodeSpec, use: Use) -> list[Any]:
    """Values in the order of the page, which shows one more widget below a seed."""
    shown: list[Any] = []
    for widget in spec.widgets:
        shown.append(use.values.get(widget.name, widget.default))
        shown += [_AFTER_SEED] if widget.is_seed else []
    return shown


def _slot(use: Use, output: str) -> int:
    outputs: tuple[Output, ...] = spec_of(use.id).outputs
    return [o.name for o in outputs].index(output)
