"""A fake ComfyUI, with what the nodes use of a ComfyUI 0.8; `test_server.py` runs a real one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mmaccel.comfy.methods import NamedPolicy
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.schemas import node_class


class Interrupted(Exception):
    """ComfyUI's own derives from `Exception` too: a broad `except` would swallow it."""


class FakeComfy:
    """What the nodes reported, and when they are interrupted.

    Attributes:
        reports: (done, total, image or None), in order.
        freed: bytes that were asked to be freed, in order.
        stop_at: number of the interrupt check that raises, from 1; 0 never raises.
        checks: interrupt checks so far.
        device: where it computes.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self, stop_at: int = 0) -> None:
        self.reports: list[tuple[int, int, Any]] = []
        self.freed: list[int] = []
        self.stop_at, self.checks, self.device = stop_at, 0, "cpu"

    def throw(self) -> None:
        self.checks += 1
        if self.checks == self.stop_at:
            raise Interrupted


class _Entry:
    def __init__(self, name: str, **options: Any) -> None:
        self.id, self.options = name, options


def _type(name: str) -> Any:
    sides = {side: type(side, (_Entry,), {"io_type": name}) for side in ("Input", "Output")}
    return type(name, (), sides)


class _ComfyNode:
    """The base of nodes."""


class _NodeOutput:
    def __init__(self, *args: Any, ui: Any = None, expand: Any = None) -> None:
        self.args, self.ui, self.expand = args, ui, expand


class _GraphNode:
    def __init__(self, id: str, name: str, inputs: dict[str, Any]) -> None:
        self.id, self.name, self.inputs = id, name, inputs

    def out(self, index: int) -> list[Any]:
        return [self.id, index]

    def set_input(self, name: str, value: Any) -> None:
        self.inputs[name] = value


class _GraphBuilder:
    """ComfyUI's own numbers its nodes below the id of the one that runs."""

    def __init__(self) -> None:
        self.nodes: list[_GraphNode] = []

    def node(self, name: str, **inputs: Any) -> _GraphNode:
        self.nodes.append(_GraphNode(f"9.0.0.{len(self.nodes) + 1}", name, inputs))
        return self.nodes[-1]

    def finalize(self) -> dict[str, Any]:
        return {n.id: {"class_type": n.name, "inputs": n.inputs} for n in self.nodes}


def install(patch: pytest.MonkeyPatch) -> FakeComfy:
    """Put the modules in place."""
    fake = FakeComfy()

    class Sync:
        execution = SimpleNamespace(
            set_progress=lambda value, most, preview_image=None: fake.reports.append(
                (value, most, preview_image)
            )
        )

    management = SimpleNamespace(
        throw_exception_if_processing_interrupted=lambda: fake.throw(),
        get_torch_device=lambda: torch.device(fake.device),
        free_memory=lambda size, device: fake.freed.append(size),
    )
    kinds = ("Image", "Audio", "Video", "String", "Int", "Float", "Boolean", "Combo")
    io = SimpleNamespace(
        ComfyNode=_ComfyNode,
        Schema=SimpleNamespace,
        NodeOutput=_NodeOutput,
        Custom=_type,
        **{kind: _type(kind.upper()) for kind in kinds},
    )
    modules: dict[str, dict[str, Any]] = {
        "comfy": {"model_management": management},
        "comfy_execution": {},
        "comfy_execution.graph_utils": {"GraphBuilder": _GraphBuilder},
        "comfy_api": {},
        "comfy_api.input_impl": {"VideoFromComponents": lambda parts: parts},
        "comfy_api.util": {"VideoComponents": SimpleNamespace},
        "comfy_api.latest": {"ComfyExtension": object, "ComfyAPISync": Sync, "io": io},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        patch.setitem(sys.modules, name, module)
    return fake


def execute(name: str, **values: Any) -> Any:
    """Run a node by its id without the prefix."""
    return node_class(NODES[f"MMAccel{name}"]).execute(**values)


def run(name: str, **values: Any) -> tuple[Any, ...]:
    """The outputs of a node."""
    outputs: tuple[Any, ...] = execute(name, **values).args
    return outputs


def policy(name: str, **values: Any) -> NamedPolicy:
    """The output of a policy's node."""
    chosen: NamedPolicy = run(f"{name}Policy", **values)[0]
    return chosen
