"""The table of nodes as ComfyUI's classes, in its third schema: `io.ComfyNode` classes in an
extension.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mmaccel.comfy.hosts import ComfyUI
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.table import NodeSpec, Output, Socket, Widget
from mmaccel.comfy.values import fingerprint, read_old_names, refusal, run_node

_NAMES = (
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
    """The names a pack's module needs.

    Raises:
        ImportError: an older ComfyUI, or none.
    """
    try:
        from comfy_api.latest import ComfyAPISync, io

        lacks = [name for name in _NAMES if not hasattr(io, name)]
        lacks += [] if hasattr(ComfyAPISync(), "execution") else ["execution"]  # as 0.3.64
    except ImportError as error:
        lacks = [str(error)]
    if lacks:
        raise ImportError(
            "mmaccel: expected a ComfyUI with the third schema of nodes (0.8.0 or newer), received "
            f"one without {lacks[0]}; update ComfyUI"
        )
    return make_exports(NODES.values())


def node_class(spec: NodeSpec) -> Any:
    """A node's class."""
    from comfy_api.latest import io

    def define_schema(cls: Any) -> Any:
        return io.Schema(
            node_id=spec.id,
            display_name=spec.title,
            category=spec.category,
            description=spec.summary,
            inputs=[_make_input(io, entry) for entry in spec.inputs],
            outputs=[_make_output(io, output) for output in spec.outputs],
            is_output_node=spec.is_output,
            enable_expand=spec.is_graph,
            hidden=[io.Hidden.prompt, io.Hidden.unique_id] if spec.has_old_names else [],
        )

    def execute(cls: Any, **values: Any) -> Any:
        if spec.has_old_names:
            values = read_old_names(spec, values, cls.hidden.prompt, cls.hidden.unique_id)
        result = run_node(spec, ComfyUI(), values)
        text = None if result.text is None else {"text": (result.text,)}
        return io.NodeOutput(*result.values, ui=text, expand=result.graph)

    def validate_inputs(cls: Any, **values: Any) -> bool | str:
        return refusal(spec, values) or True

    def fingerprint_inputs(cls: Any, **values: Any) -> str:
        return fingerprint(spec, values)

    own = [define_schema, execute, validate_inputs, fingerprint_inputs]
    members = {function.__name__: classmethod(function) for function in own}
    return type(spec.id, (io.ComfyNode,), {"__doc__": spec.summary, **members})


def make_exports(specs: Iterable[NodeSpec]) -> dict[str, Any]:
    """The names a pack's module has."""
    from comfy_api.latest import ComfyExtension

    specs = list(specs)

    class Extension(ComfyExtension):  # type: ignore[misc, unused-ignore]
        """All nodes."""

        async def get_node_list(self) -> list[Any]:
            return [node_class(spec) for spec in specs]

    def comfy_entrypoint() -> Any:
        return Extension()

    return {"comfy_entrypoint": comfy_entrypoint}


def _make_type(io: Any, kind: str) -> Any:
    own = {"IMAGE": io.Image, "VIDEO": io.Video, "AUDIO": io.Audio, "STRING": io.String}
    return own.get(kind) or io.Custom(kind)


def _make_output(io: Any, output: Output) -> Any:
    # Some versions want ids to differ from those of the inputs; the page shows the name.
    own = f"made_{output.name}"
    return _make_type(io, output.kind).Output(own, display_name=output.name, tooltip=output.tooltip)


def _make_input(io: Any, entry: Widget | Socket) -> Any:
    if isinstance(entry, Socket):
        socket = _make_type(io, entry.kind)
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
