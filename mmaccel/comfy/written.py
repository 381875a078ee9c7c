"""Files that are written from the table of nodes: example workflows, and a table in the docs."""

from __future__ import annotations

import json
from pathlib import Path

from mmaccel.comfy.examples import EXAMPLES
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.table import NodeSpec
from mmaccel.comfy.workflow import to_api, to_page

_PAGE = "docs/comfyui.md"
_SHELF = "mmaccel/comfy/pack/example_workflows"
_BEGIN, _END = "<!-- nodes -->\n", "<!-- end nodes -->"


def written_files(root: Path) -> dict[str, str]:
    """Path below `root`, a checkout, to what it must hold."""
    files = {}
    for name, uses in EXAMPLES.items():
        files[f"{_SHELF}/{name}.json"] = _to_json(to_page(uses))
        # ComfyUI lists what lies in the folder itself as templates, which these are not.
        files[f"{_SHELF}/api/{name}.json"] = _to_json(to_api(uses))
    page = (root / _PAGE).read_text(encoding="utf-8")
    head, rest = page.split(_BEGIN)
    files[_PAGE] = head + _BEGIN + node_table() + _END + rest.split(_END)[1]
    return files


def node_table() -> str:
    """The nodes in Markdown, one a line."""
    lines = ["| node | inputs | outputs | what |", "| --- | --- | --- | --- |"]
    for spec in NODES.values():
        outputs = ", ".join(f"`{output.name}`" for output in spec.outputs)
        lines.append(f"| `{spec.id}` | {_inputs(spec)} | {outputs} | {spec.summary} |")
    return "\n".join(lines) + "\n"


def _inputs(spec: NodeSpec) -> str:
    return ", ".join(f"`{entry.name}`" for entry in spec.inputs) or "–"


def _to_json(value: object) -> str:
    return json.dumps(value, indent=1) + "\n"
