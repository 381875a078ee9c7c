"""The table as ComfyUI's first schema: classes with `INPUT_TYPES` and their like."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mmaccel.comfy.hosts import V1Host
from mmaccel.comfy.table import NodeSpec, Socket, Widget
from mmaccel.comfy.values import meanings, refusal, run_node

_TYPES = {
    **{"int": "INT", "float": "FLOAT", "bool": "BOOLEAN"},
    **dict.fromkeys(("text", "path", "ids"), "STRING"),
}


def v1_class(spec: NodeSpec) -> type:
    """A node's class."""

    def input_types(cls: type) -> dict[str, dict[str, Any]]:
        required = {e.name: _input(e) for e in spec.inputs if not getattr(e, "is_optional", False)}
        optional = {s.name: _input(s) for s in spec.sockets if s.is_optional}
        return {"required": required, **({"optional": optional} if optional else {})}

    def validate_inputs(cls: type, **values: Any) -> bool | str:
        return refusal(spec, values) or True

    def is_changed(cls: type, **values: Any) -> str:
        assert spec.fingerprint is not None
        return spec.fingerprint(**meanings(spec, values))

    def execute(self: Any, **values: Any) -> Any:
        made = run_node(spec, V1Host(), values)
        if made.text is None:
            return made.values
        return {"ui": {"text": (made.text,)}, "result": made.values}

    members: dict[str, Any] = {
        "__doc__": spec.summary,
        "INPUT_TYPES": classmethod(input_types),
        "RETURN_TYPES": tuple(output.kind for output in spec.outputs),
        "RETURN_NAMES": tuple(output.name for output in spec.outputs),
        "OUTPUT_TOOLTIPS": tuple(output.tooltip for output in spec.outputs),
        "OUTPUT_NODE": spec.is_output,
        "FUNCTION": "execute",
        "CATEGORY": spec.category,
        "DESCRIPTION": spec.summary,
        "VALIDATE_INPUTS": classmethod(validate_inputs),
        "execute": execute,
    }
    if spec.fingerprint is not None:
        members["IS_CHANGED"] = classmethod(is_changed)
    return type(spec.id, (), members)


def v1_exports(specs: Iterable[NodeSpec]) -> dict[str, Any]:
    """What a pack of this schema has in its module."""
    chosen = list(specs)
    return {
        "NODE_CLASS_MAPPINGS": {spec.id: v1_class(spec) for spec in chosen},
        "NODE_DISPLAY_NAME_MAPPINGS": {spec.id: spec.title for spec in chosen},
    }


def _input(entry: Widget | Socket) -> tuple[Any, dict[str, Any]]:
    options: dict[str, Any] = {"tooltip": entry.tooltip}
    if isinstance(entry, Socket):
        return entry.kind, options
    options["default"] = entry.default
    if entry.kind in ("int", "float"):
        options |= {"min": entry.least, "max": entry.most, "step": entry.step}
    if entry.kind == "float":
        options["round"] = False  # else the page rounds to the step
    if entry.is_seed:
        options["control_after_generate"] = True
    if entry.is_multiline:
        options["multiline"] = True
    return (list(entry.choices) if entry.choices else _TYPES[entry.kind]), options
