"""The table as ComfyUI's third schema: `io.ComfyNode` classes in an extension."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mmaccel.comfy.hosts import V3Host
from mmaccel.comfy.table import NodeSpec, Output, Socket, Widget
from mmaccel.comfy.values import meanings, refusal, run_node

_NEEDED = (
    "ComfyNode",
    "Schema",
    "NodeOutput",
    "Custom",
    "Int",
    "Float",
    "Boolean",
    "String",
    "Audio",
)


def has_v3() -> bool:
    """Whether the ComfyUI at hand has this schema, with all that is used of it."""
    try:
        from comfy_api.latest import ComfyAPISync, io
    except ImportError:
        return False
    if not all(hasattr(io, name) for name in _NEEDED):
        return False
    return hasattr(ComfyAPISync(), "execution")  # it is promised, and missing, in 0.3.64


def v3_class(spec: NodeSpec) -> Any:
    """A node's class."""
    from comfy_api.latest import io

    def define_schema(cls: Any) -> Any:
        return io.Schema(
            node_id=spec.id,
            display_name=spec.title,
            category=spec.category,
            description=spec.summary,
            inputs=[_input(io, entry) for entry in spec.inputs],
            outputs=[_output(io, output) for output in spec.outputs],
            is_output_node=spec.is_output,
        )

    def execute(cls: Any, **values: Any) -> Any:
        made = run_node(spec, V3Host(), values)
        text = None if made.text is None else {"text": (made.text,)}
        return io.NodeOutput(*made.values, ui=text)

    def validate_inputs(cls: Any, **values: Any) -> bool | str:
        return refusal(spec, values) or True

    def fingerprint_inputs(cls: Any, **values: Any) -> str:
        assert spec.fingerprint is not None
        return spec.fingerprint(**meanings(spec, values))

    own = [define_schema, execute, validate_inputs]
    own += [fingerprint_inputs] if spec.fingerprint is not None else []
    members = {function.__name__: classmethod(function) for function in own}
    return type(spec.id, (io.ComfyNode,), {"__doc__": spec.summary, **members})


def v3_exports(specs: Iterable[NodeSpec]) -> dict[str, Any]:
    """What a pack of this schema has in its module."""
    from comfy_api.latest import ComfyExtension

    chosen = list(specs)

    class Extension(ComfyExtension):  # type: ignore[misc, unused-ignore]
        """All nodes."""

        async def get_node_list(self) -> list[Any]:
            return [v3_class(spec) for spec in chosen]

    def comfy_entrypoint() -> Any:
        return Extension()

    return {"comfy_entrypoint": comfy_entrypoint}


def _type(io: Any, kind: str) -> Any:
    own = {"IMAGE": io.Image, "VIDEO": io.Video, "AUDIO": io.Audio, "STRING": io.String}
    return own.get(kind) or io.Custom(kind)


def _output(io: Any, output: Output) -> Any:
    # Some versions want ids to differ from those of the inputs; the page shows the name.
    own = f"made_{output.name}"
    return _type(io, output.kind).Output(own, display_name=output.name, tooltip=output.tooltip)


def _input(io: Any, entry: Widget | Socket) -> Any:
    if isinstance(entry, Socket):
        socket = _type(io, entry.kind)
        return socket.Input(entry.name, optional=entry.is_optional, tooltip=entry.tooltip)
    options: dict[str, Any] = {"tooltip": entry.tooltip, "default": entry.default}
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
