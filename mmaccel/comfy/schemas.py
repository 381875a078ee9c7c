"""The table of nodes as ComfyUI's classes: the first schema, and the third where ComfyUI has it.

The first schema is classes with `INPUT_TYPES` and the like; the third is `io.ComfyNode` classes in
an extension. ComfyUI never calls an entry point next to `NODE_CLASS_MAPPINGS`, so a pack exports
one schema, never both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mmaccel.comfy.hosts import V1Host, V3Host
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.table import NodeSpec, Output, Socket, Widget
from mmaccel.comfy.values import fingerprint, read_old_names, refusal, run_node

_GRAPH, _NODE = "whole_graph", "own_id"  # inputs that ComfyUI fills, in the first schema

_V1_TYPES = {
    **{"int": "INT", "float": "FLOAT", "bool": "BOOLEAN"},
    **dict.fromkeys(("text", "path", "ids"), "STRING"),
}
_V3_NAMES = (
    "ComfyNode",
    "Schema",
    "NodeOutput",
    "Custom",
    "Int",
    "Float",
    "Boolean",
    "String",
    "Audio",
    "Hidden",
)


def find_exports() -> dict[str, Any]:
    """The names a pack's module needs, for the ComfyUI that imports it."""
    return v3_exports(NODES.values()) if has_v3() else v1_exports(NODES.values())


def v1_class(spec: NodeSpec) -> type:
    """A node's class in the first schema."""

    def input_types(cls: type) -> dict[str, dict[str, Any]]:
        groups: dict[str, dict[str, Any]] = {"required": {}}
        for entry in spec.inputs:
            group = groups.setdefault("optional" if entry.is_optional else "required", {})
            group[entry.name] = _v1_input(entry)
        if spec.has_old_names:
            groups["hidden"] = {_GRAPH: "PROMPT", _NODE: "UNIQUE_ID"}
        return groups

    def validate_inputs(cls: type, **values: Any) -> bool | str:
        return refusal(spec, values) or True

    def is_changed(cls: type, **values: Any) -> str:
        return fingerprint(spec, values)

    def execute(self: Any, **values: Any) -> Any:
        graph, node = values.pop(_GRAPH, {}), values.pop(_NODE, "")
        result = run_node(spec, V1Host(), read_old_names(spec, values, graph, node))
        extra: dict[str, Any] = {}
        if result.text is not None:
            extra["ui"] = {"text": (result.text,)}
        if result.graph is not None:
            extra["expand"] = result.graph
        return {"result": result.values, **extra} if extra else result.values

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
        "IS_CHANGED": classmethod(is_changed),
        "execute": execute,
    }
    return type(spec.id, (), members)


def v1_exports(specs: Iterable[NodeSpec]) -> dict[str, Any]:
    """The names a pack's module has in this schema."""
    specs = list(specs)
    return {
        "NODE_CLASS_MAPPINGS": {spec.id: v1_class(spec) for spec in specs},
        "NODE_DISPLAY_NAME_MAPPINGS": {spec.id: spec.title for spec in specs},
    }


def _v1_input(entry: Widget | Socket) -> tuple[Any, dict[str, Any]]:
    options: dict[str, Any] = {"tooltip": entry.tooltip}
    if isinstance(entry, Socket):
        return entry.kind, options
    options["default"] = entry.default
    if entry.is_advanced:
        options["advanced"] = True
    if entry.kind in ("int", "float"):
        options |= {"min": entry.least, "max": entry.most, "step": entry.step}
    if entry.kind == "float":
        options["round"] = False  # else the page rounds to the step
    if entry.is_seed:
        options["control_after_generate"] = True
    if entry.is_multiline:
        options["multiline"] = True
    return (list(entry.choices) if entry.choices else _V1_TYPES[entry.kind]), options


def has_v3() -> bool:
    """Whether this ComfyUI has the third schema, with everything that is used of it."""
    try:
        from comfy_api.latest import ComfyAPISync, io
    except ImportError:
        return False
    if not all(hasattr(io, name) for name in _V3_NAMES):
        return False
    return hasattr(ComfyAPISync(), "execution")  # missing in 0.3.64


def v3_class(spec: NodeSpec) -> Any:
    """A node's class in the third schema."""
    from comfy_api.latest import io

    def define_schema(cls: Any) -> Any:
        return io.Schema(
            node_id=spec.id,
            display_name=spec.title,
            category=spec.category,
            description=spec.summary,
            inputs=[_v3_input(io, entry) for entry in spec.inputs],
            outputs=[_v3_output(io, output) for output in spec.outputs],
            is_output_node=spec.is_output,
            enable_expand=spec.is_graph,
            hidden=[io.Hidden.prompt, io.Hidden.unique_id] if spec.has_old_names else [],
        )

    def execute(cls: Any, **values: Any) -> Any:
        if spec.has_old_names:
            values = read_old_names(spec, values, cls.hidden.prompt, cls.hidden.unique_id)
        result = run_node(spec, V3Host(), values)
        text = None if result.text is None else {"text": (result.text,)}
        return io.NodeOutput(*result.values, ui=text, expand=result.graph)

    def validate_inputs(cls: Any, **values: Any) -> bool | str:
        return refusal(spec, values) or True

    def fingerprint_inputs(cls: Any, **values: Any) -> str:
        return fingerprint(spec, values)

    own = [define_schema, execute, validate_inputs, fingerprint_inputs]
    members = {function.__name__: classmethod(function) for function in own}
    return type(spec.id, (io.ComfyNode,), {"__doc__": spec.summary, **members})


def v3_exports(specs: Iterable[NodeSpec]) -> dict[str, Any]:
    """The names a pack's module has in this schema."""
    from comfy_api.latest import ComfyExtension

    specs = list(specs)

    class Extension(ComfyExtension):  # type: ignore[misc, unused-ignore]
        """All nodes."""

        async def get_node_list(self) -> list[Any]:
            return [v3_class(spec) for spec in specs]

    def comfy_entrypoint() -> Any:
        return Extension()

    return {"comfy_entrypoint": comfy_entrypoint}


def _v3_type(io: Any, kind: str) -> Any:
    own = {"IMAGE": io.Image, "VIDEO": io.Video, "AUDIO": io.Audio, "STRING": io.String}
    return own.get(kind) or io.Custom(kind)


def _v3_output(io: Any, output: Output) -> Any:
    # Some versions want ids to differ from those of the inputs; the page shows the name.
    own = f"made_{output.name}"
    return _v3_type(io, output.kind).Output(own, display_name=output.name, tooltip=output.tooltip)


def _v3_input(io: Any, entry: Widget | Socket) -> Any:
    if isinstance(entry, Socket):
        socket = _v3_type(io, entry.kind)
        return socket.Input(entry.name, optional=entry.is_optional, tooltip=entry.tooltip)
    options: dict[str, Any] = {"tooltip": entry.tooltip, "default": entry.default}
    options["optional"] = entry.is_optional
    if entry.is_advanced:
        options["extra_dict"] = {"advanced": True}
    if entry.kind == "choice":
        return io.Combo.Input(entry.name, options=list(entry.choices), **options)
    if entry.kind == "bool":
        return io.Boolean.Input(entry.name, **options)
    if entry.kind in ("text", "path", "ids"):
        return io.String.Input(entry.name, multiline=entry.is_multiline, **options)
    options |= {"min": entry.least, "max": entry.most, "step": entry.step}
    if entry.kind == "float":
        return io.Float.Input(entry.name, round=False, **options)  # else the page rounds to steps
    return io.Int.Input(entry.name, control_after_generate=entry.is_seed or None, **options)
