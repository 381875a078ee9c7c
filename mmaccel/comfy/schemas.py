"""Nodes as ComfyUI's classes, in its third schema: `io.ComfyNode` classes in an extension."""

from __future__ import annotations

from typing import Any

import torch

from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.ports import Node


def node_class(node: Node) -> Any:
    from comfy_api.latest import io

    def make_type(kind: str) -> Any:
        return getattr(io, kind.title(), None) or io.Custom(kind)

    def define_schema(cls: Any) -> Any:
        inputs = [
            make_type(each.kind).Input(
                each.name, tooltip=each.tooltip, optional=each.is_optional, **each.options
            )
            for each in node.inputs
        ]
        outputs = [  # some versions want ids to differ from those of inputs; the page shows names
            make_type(each.kind).Output(
                f"made_{each.name}", display_name=each.name, tooltip=each.tooltip
            )
            for each in node.outputs
        ]
        return io.Schema(
            node_id=node.id,
            display_name=node.title,
            category=node.category,
            description=node.summary,
            inputs=inputs,
            outputs=outputs,
            is_output_node=node.is_output,
            enable_expand=node.is_graph,
        )

    def execute(cls: Any, **values: Any) -> Any:
        links = {each.name: values.get(each.name) for each in node.links}
        read = node.read(values)  # values that come over a link were not checked before
        # ComfyUI runs nodes in inference mode. A model loaded there could be used nowhere else, and
        # the command line, which gives the same images, does not run in it.
        with torch.inference_mode(False), torch.no_grad():
            made = node.run(**read, **links)
        return io.NodeOutput(*made) if isinstance(made, tuple) else made

    def validate_inputs(cls: Any, **values: Any) -> bool | str:
        return node.refusal(values) or True

    def fingerprint_inputs(cls: Any, **values: Any) -> str:
        read = node.read(values)
        drawn = read["seed"] if values.get("seed") == -1 else ""
        return f"{node.fingerprint(**read)} {drawn}".rstrip()

    own = [define_schema, execute, validate_inputs, fingerprint_inputs]
    members = {function.__name__: classmethod(function) for function in own}
    return type(node.id, (io.ComfyNode,), {"__doc__": node.summary, **members})


def find_exports() -> dict[str, Any]:
    """The names a pack's module needs."""
    try:
        from comfy_api.latest import ComfyAPISync, ComfyExtension

        assert hasattr(ComfyAPISync(), "execution")  # which 0.3.64 lacks
    except (ImportError, AssertionError) as error:
        raise ImportError(
            "mmaccel: expected a ComfyUI with the third schema of nodes (0.8.0 or newer), received "
            f"an older one ({error}); update ComfyUI"
        ) from error

    class Extension(ComfyExtension):  # type: ignore[misc, unused-ignore]
        """All nodes."""

        async def get_node_list(self) -> list[Any]:
            return [node_class(node) for node in NODES.values()]

    return {"comfy_entrypoint": Extension}
