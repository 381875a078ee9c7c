"""Write what is made from the table of nodes: example workflows in ComfyUI's two file formats, and
the table of nodes that are of no method in docs/comfyui.md; with --check, only compare.

The API format is what `POST /prompt` takes; the other one is what the page opens and saves.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmaccel.comfy.methods import METHOD_NODES
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.ports import Node, Port, text

ROOT = Path(__file__).resolve().parent.parent
_PAGE = "docs/comfyui.md"
_FOLDER = "mmaccel/comfy/pack/example_workflows"
_BEGIN, _END = "<!-- nodes -->\n", "<!-- end nodes -->"
_WIDE, _GAP, _HEAD, _SLOT, _WIDGET, _TEXT = 320, 60, 40, 20, 24, 70  # pixels on the page


def _theirs(id: str, *ports: Port, outputs: Sequence[Port] = ()) -> Node:
    return Node(id, id, "", "", ports, outputs, run=lambda: None)


_PREFIX = text("filename_prefix", "mmaccel", "")
KINDS = {  # every node a workflow may have: ours, and some that every ComfyUI has
    **NODES,
    **{
        node.id: node
        for node in (
            _theirs("SaveImage", Port("images", "IMAGE", ""), _PREFIX),
            _theirs("SaveAudio", Port("audio", "AUDIO", ""), _PREFIX),
            _theirs(
                "SaveVideo",
                Port("video", "VIDEO", ""),
                _PREFIX,
                text("format", "auto", ""),
                text("codec", "auto", ""),
            ),
            _theirs(
                "LoadImage",
                text("image", "example.png", ""),
                outputs=[Port("IMAGE", "IMAGE", ""), Port("MASK", "MASK", "")],
            ),
            _theirs("PreviewAny", Port("source", "*", "")),
        )
    },
}


@dataclass(frozen=True)
class Step:
    """A node in a workflow.

    Attributes:
        column: on the page, from the left.
        values: of widgets that are not their defaults.
        links: input -> (index of a node in the workflow, name of its output).
        below: pixels below its widgets, for what a run shows there.
    """

    id: str
    column: int
    values: Mapping[str, Any] = field(default_factory=dict)
    links: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    below: int = 0
    width: int = _WIDE


def to_api(workflow: Sequence[Step]) -> dict[str, Any]:
    """The API format; nodes are numbered from 1."""
    graph: dict[str, Any] = {}
    for number, step in enumerate(workflow, 1):
        node = KINDS[step.id]
        inputs = {each.name: each.default for each in node.widgets} | step.values
        for name, (index, output) in step.links.items():
            outputs = [each.name for each in KINDS[workflow[index].id].outputs]
            inputs[name] = [str(index + 1), outputs.index(output)]
        meta = {"title": node.title}
        graph[str(number)] = {"inputs": inputs, "class_type": step.id, "_meta": meta}
    return graph


def to_page(workflow: Sequence[Step]) -> dict[str, Any]:
    """The format of the page (version 0.4); nodes and links are numbered from 1."""
    graph = to_api(workflow)
    nodes: list[dict[str, Any]] = []
    below = Counter[int]()  # column -> pixels of its nodes so far
    for number, step in enumerate(workflow, 1):
        node, given = KINDS[step.id], graph[str(number)]["inputs"]
        shown: list[Any] = []
        for port in node.widgets:  # below a seed the page shows what becomes of it
            is_seed = "control_after_generate" in port.options
            shown += [given[port.name], "fixed"] if is_seed else [given[port.name]]
        slots = max(len(node.links), len(node.outputs))
        n_texts = sum("multiline" in port.options for port in node.widgets)
        height = _HEAD + _SLOT * slots + _WIDGET * len(shown) + _TEXT * n_texts + step.below
        columns = range(step.column)
        left = sum(max(each.width for each in workflow if each.column == k) for k in columns)
        nodes.append(
            {
                "id": number,
                "type": step.id,
                "pos": [left + _GAP * (1 + step.column), _GAP + below[step.column]],
                "size": [step.width, height],
                "flags": {},
                "order": number - 1,
                "mode": 0,
                "inputs": [
                    {"name": port.name, "type": port.kind, "link": None}
                    | ({"shape": 7} if port.is_optional else {})  # drawn hollow
                    for port in node.links
                ],
                "outputs": [
                    {"name": port.name, "type": port.kind, "links": []} for port in node.outputs
                ],
                "properties": {"Node name for S&R": step.id},
                "widgets_values": shown,
            }
        )
        below[step.column] += height + _GAP
    links: list[list[Any]] = []
    for target in nodes:
        given = graph[str(target["id"])]["inputs"]
        places = [each["name"] for each in target["inputs"]]
        for name, value in given.items():
            if name in places:
                place, (source, slot) = places.index(name), value
                made = nodes[int(source) - 1]["outputs"][slot]
                number = len(links) + 1
                links.append([number, int(source), slot, target["id"], place, made["type"]])
                target["inputs"][place]["link"] = number
                made["links"].append(number)
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


_STATS = (
    Step("MMAccelStats", 2, links={"stats": (2, "stats")}),
    Step("PreviewAny", 3, links={"source": (4, "text")}, below=260, width=560),
)
_PROMPTS = "a red circle above a small blue square on grass\na large yellow star at night"
_SEED = {"seed": 7}


def _workflow(
    load: Step,
    make: tuple[str, Mapping[str, Any], int],
    save: Step,
    *more: Step,
    decode: Step = Step("MMAccelJacobiPolicy", 0),
    **links: tuple[int, str],
) -> tuple[Step, ...]:
    """Load a model, make something under a policy, save it, show what it cost."""
    name = KINDS[load.id].outputs[0].name
    id, values, below = make
    links = {name: (0, name), **(links or {"policy": (1, "policy")})}
    return (load, decode, Step(id, 1, values, links, below), save, *_STATS, *more)


_PICTURES = Step("SaveImage", 2, links={"images": (2, "images")}, below=220)
_FILM = Step("SaveVideo", 2, links={"video": (2, "video")}, below=320)
_PHOTO = Step("LoadImage", 0, below=320)
EXAMPLES = {
    "mmaccel_text_to_image": (
        Step("MMAccelTextToImage", 0, _SEED, below=220),
        Step("SaveImage", 1, links={"images": (0, "images")}, below=220),
    ),
    "mmaccel_generate": _workflow(
        Step("MMAccelLoadModel", 0),
        ("MMAccelGenerateImage", {"prompt": _PROMPTS, **_SEED}, 220),
        _PICTURES,
    ),
    "mmaccel_compare": _workflow(
        Step("MMAccelLoadModel", 0),
        ("MMAccelCompare", {"prompt": _PROMPTS, **_SEED}, 220),
        Step(
            "SaveImage",
            2,
            {"filename_prefix": "mmaccel_compare"},
            {"images": (2, "sheet")},
            below=320,
            width=560,
        ),
    ),
    "mmaccel_canvas": _workflow(
        Step("MMAccelLoadModel", 0, {"model": "scenes-masked"}),
        ("MMAccelGenerateImage", _SEED, 220),
        _PICTURES,
        decode=Step("MMAccelLosslessUnmaskPolicy", 0),
    ),
    "mmaccel_speech": _workflow(
        Step("MMAccelLoadSpeechModel", 0),
        ("MMAccelGenerateSpeech", _SEED, 0),
        Step("SaveAudio", 2, links={"audio": (2, "audio")}, below=120),
    ),
    "mmaccel_text_to_video": _workflow(
        Step("MMAccelLoadTextToVideoModel", 0), ("MMAccelTextToVideo", _SEED, 0), _FILM
    ),
    "mmaccel_video": _workflow(
        Step("MMAccelLoadVideoModel", 0),
        ("MMAccelGenerateVideo", _SEED, 0),
        _FILM,
        _PHOTO,
        policy=(1, "policy"),
        start=(6, "IMAGE"),
    ),
    "mmaccel_answer": _workflow(
        Step("MMAccelLoadVisionModel", 0),
        ("MMAccelAnswerQuestion", {}, 0),
        Step("SaveImage", 2, links={"images": (2, "kept")}, below=320, width=560),
        _PHOTO,
        Step("MMAccelVisualTokens", 0),
        Step("PreviewAny", 2, links={"source": (2, "text")}, below=60),
        image=(6, "IMAGE"),
        policy=(1, "policy"),
        visual_tokens=(7, "visual_tokens"),
    ),
}


def generated_files() -> dict[str, str]:
    """Path below `ROOT` -> the text that the file must hold."""
    files = {}
    for name, workflow in EXAMPLES.items():
        files[f"{_FOLDER}/{name}.json"] = json.dumps(to_page(workflow), indent=1) + "\n"
        # ComfyUI lists files of the folder itself as templates, which these are not.
        files[f"{_FOLDER}/api/{name}.json"] = json.dumps(to_api(workflow), indent=1) + "\n"
    head, rest = (ROOT / _PAGE).read_text(encoding="utf-8").split(_BEGIN)
    lines = ["| node | outputs | what |", "| --- | --- | --- |"]
    of_methods = {node.id for node in METHOD_NODES}  # one for each row of the catalog
    for node in NODES.values():
        if node.id not in of_methods:
            outputs = ", ".join(f"`{each.name}`" for each in node.outputs)
            lines.append(f"| `{node.id}` | {outputs} | {node.summary} |")
    files[_PAGE] = head + _BEGIN + "\n".join(lines) + "\n" + _END + rest.split(_END)[1]
    return files


def main() -> int:
    """Returns 1 if `--check` found a file that differs."""
    stale = []
    for name, content in generated_files().items():
        file = ROOT / name
        if not file.is_file() or file.read_text(encoding="utf-8") != content:
            stale.append(name)
            if "--check" not in sys.argv:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(content, encoding="utf-8")
    print(*stale, sep="\n")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
