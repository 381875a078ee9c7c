"""A fake ComfyUI, with what the nodes use of a ComfyUI 0.8; `test_server.py` runs a real one."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mmaccel.comfy.methods import NamedPolicy
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.runs import RunRecord
from mmaccel.comfy.schemas import node_class
from mmaccel.comfy.table import PREFIX, NodeResult
from mmaccel.comfy.values import run_node


class Interrupted(Exception):
    """ComfyUI's own derives from `Exception` too: a broad `except` would swallow it."""


class FakeComfy:
    """What the nodes reported, and when they are interrupted.

    Attributes:
        reports: (done, total, image or None), in order.
        freed: (bytes, device) that were asked to be freed, in order.
        stop_at: number of the interrupt check that raises, from 1; 0 never raises.
        checks: interrupt checks so far.
    """

    def __init__(self) -> None:
        self.reports: list[tuple[int, int, Any]] = []
        self.freed: list[tuple[int, Any]] = []
        self.stop_at = self.checks = 0

    def throw(self) -> None:
        self.checks += 1
        if self.checks == self.stop_at:
            raise Interrupted


class _Entry:
    def __init__(self, name: str, **options: Any) -> None:
        self.id, self.options = name, options


def _type(name: str) -> Any:
    make = type(name, (), {})
    for side in ("Input", "Output"):
        setattr(make, side, type(side, (_Entry,), {"io_type": name}))
    return make


class _ComfyNode:
    hidden = SimpleNamespace(prompt={}, unique_id="")

    @classmethod
    def GET_SCHEMA(cls) -> Any:
        return cls.define_schema()  # type: ignore[attr-defined]


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


class GraphBuilder:
    """ComfyUI's own numbers its nodes below the id of the one that runs."""

    def __init__(self) -> None:
        self.nodes: list[_GraphNode] = []

    def node(self, name: str, **inputs: Any) -> _GraphNode:
        self.nodes.append(_GraphNode(f"9.0.0.{len(self.nodes) + 1}", name, inputs))
        return self.nodes[-1]

    def finalize(self) -> dict[str, Any]:
        return {n.id: {"class_type": n.name, "inputs": n.inputs} for n in self.nodes}


def install(monkeypatch: pytest.MonkeyPatch) -> FakeComfy:
    """Put the modules in place for one test."""
    fake = FakeComfy()

    class Sync:
        execution = SimpleNamespace(
            set_progress=lambda value, most, preview_image=None: fake.reports.append(
                (value, most, preview_image)
            )
        )

    management = SimpleNamespace(
        throw_exception_if_processing_interrupted=fake.throw,
        get_torch_device=lambda: torch.device("cpu"),
        free_memory=lambda size, device: fake.freed.append((size, device)),
    )
    modules: dict[str, dict[str, Any]] = {
        "comfy": {"model_management": management},
        "comfy.model_management": vars(management),
    }
    modules |= {
        "comfy_execution": {},
        "comfy_execution.graph_utils": {"GraphBuilder": GraphBuilder},
        "comfy_api": {},
        "comfy_api.input_impl": {"VideoFromComponents": lambda parts: parts},
        "comfy_api.util": {"VideoComponents": SimpleNamespace},
    }
    io = SimpleNamespace(
        ComfyNode=_ComfyNode,
        Schema=lambda **options: SimpleNamespace(**options),
        NodeOutput=_NodeOutput,
        Hidden=SimpleNamespace(prompt="PROMPT", unique_id="UNIQUE_ID"),
        Custom=_type,
        Image=_type("IMAGE"),
        Audio=_type("AUDIO"),
        Video=_type("VIDEO"),
        String=_type("STRING"),
        Int=_type("INT"),
        Float=_type("FLOAT"),
        Boolean=_type("BOOLEAN"),
        Combo=_type("COMBO"),
    )
    latest = {"ComfyExtension": object, "ComfyAPISync": Sync, "io": io}
    modules |= {"comfy_api.latest": latest}
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return fake


class Host:
    """A host that counts; the check number `stop_at`, from 1, raises."""

    def __init__(self, stop_at: int = 0) -> None:
        self.stop_at, self.checks = stop_at, 0
        self.reports: list[tuple[int, int, Any]] = []
        self.freed: list[tuple[int, str]] = []

    def check_interrupt(self) -> None:
        self.checks += 1
        if self.checks == self.stop_at:
            raise Interrupted

    def report(self, done: int, total: int, image: Any) -> None:
        self.reports.append((done, total, image))

    def device(self) -> str:
        return "cpu"

    def graph(self) -> GraphBuilder:
        return GraphBuilder()

    def free_memory(self, size: int, device: str) -> None:
        self.freed.append((size, device))

    def video(self, frames: torch.Tensor, fps: float) -> tuple[torch.Tensor, float]:
        return frames, fps


def run(name: str, host: Host | None = None, **values: Any) -> NodeResult:
    """Run a node by its id without the prefix."""
    return run_node(NODES[f"{PREFIX}{name}"], host or Host(), values)


def run_graph(graph: dict[str, Any], node: str, host: Host, cache: dict[str, Any]) -> Any:
    """The outputs of a node of a graph in the API format, as ComfyUI's executor runs it.

    Args:
        graph: nodes that a node adds are added to it.
        node: the one that is wanted.
        host: of all nodes.
        cache: outputs of nodes by what they were made from, kept between runs of a graph.
    """

    def value_of(given: Any) -> Any:
        return (
            run_graph(graph, given[0], host, cache)[given[1]] if isinstance(given, list) else given
        )

    def signature(given: Any) -> Any:
        if not isinstance(given, list):
            return given
        source = graph[given[0]]
        return (
            source["class_type"],
            {k: signature(v) for k, v in source["inputs"].items()},
            given[1],
        )

    asked = graph[node]
    key = repr(signature([node, 0]))
    if key not in cache:
        values = {name: value_of(given) for name, given in asked["inputs"].items()}
        made = run_node(NODES[asked["class_type"]], host, values)
        graph.update(made.graph or {})
        cache[key] = tuple(map(value_of, made.values)) if made.graph else made.values
    return cache[key]


def policy(name: str, **values: Any) -> NamedPolicy:
    """The output of a policy's node."""
    chosen: NamedPolicy = run(f"{name}Policy", **values).values[0]
    return chosen


def call(name: str, graph: Mapping[str, Any] | None = None, **values: Any) -> Any:
    """Run node "3" of a graph through its class; its outputs and its text."""
    cls: Any = node_class(NODES[f"{PREFIX}{name}"])
    cls.hidden = SimpleNamespace(prompt=graph or {}, unique_id="3")
    output = cls.execute(**values)
    return output.args, output.ui and output.ui["text"]


def passes_of(record: RunRecord) -> list[int]:
    """Forward passes of each image, as the text says."""
    found = [re.search(r" in (\d+) forward passes: ", line) for line in record.lines]
    return [int(match[1]) for match in found if match]
