"""A fake ComfyUI, with what the nodes use of a ComfyUI 0.8; `test_server.py` runs a real one."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.policies import NamedPolicy
from mmaccel.comfy.schemas import v1_class, v3_class
from mmaccel.comfy.stats import RunRecord
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
    @classmethod
    def GET_SCHEMA(cls) -> Any:
        return cls.define_schema()  # type: ignore[attr-defined]


class _NodeOutput:
    def __init__(self, *args: Any, ui: Any = None) -> None:
        self.args, self.ui = args, ui


def install(monkeypatch: pytest.MonkeyPatch, *, with_v3: bool) -> FakeComfy:
    """Put the modules in place for one test."""
    fake = FakeComfy()

    class Bar:
        def __init__(self, total: int) -> None:
            self.total = total

        def update_absolute(self, value: int, total: int, preview: Any = None) -> None:
            fake.reports.append((value, total, None if preview is None else preview[1]))

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
        "comfy": {"model_management": management, "utils": SimpleNamespace(ProgressBar=Bar)},
        "comfy.utils": {"ProgressBar": Bar},
        "comfy.model_management": vars(management),
    }
    modules |= {
        "comfy_api": {},
        "comfy_api.input_impl": {"VideoFromComponents": lambda parts: parts},
        "comfy_api.util": {"VideoComponents": SimpleNamespace},
    }
    if with_v3:
        io = SimpleNamespace(
            ComfyNode=_ComfyNode,
            Schema=lambda **options: SimpleNamespace(**options),
            NodeOutput=_NodeOutput,
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
    else:
        monkeypatch.setitem(sys.modules, "comfy_api.latest", None)
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

    def free_memory(self, size: int, device: str) -> None:
        self.freed.append((size, device))

    def video(self, frames: torch.Tensor, fps: float) -> tuple[torch.Tensor, float]:
        return frames, fps


def run(name: str, host: Host | None = None, **values: Any) -> NodeResult:
    """Run a node by its id without the prefix."""
    return run_node(NODES[f"{PREFIX}{name}"], host or Host(), values)


def policy(name: str, **values: Any) -> NamedPolicy:
    """The output of a policy's node."""
    chosen: NamedPolicy = run(f"{name}Policy", **values).values[0]
    return chosen


def call(with_v3: bool, name: str, **values: Any) -> Any:
    """Run a node through its class in one of the schemas; its outputs and its text."""
    spec = NODES[f"{PREFIX}{name}"]
    if with_v3:
        output = v3_class(spec).execute(**values)
        return output.args, output.ui and output.ui["text"]
    cls: Any = v1_class(spec)
    output = getattr(cls(), cls.FUNCTION)(**values)
    if isinstance(output, dict):
        return output["result"], output["ui"]["text"]
    return output, None


def passes_of(record: RunRecord) -> list[int]:
    """Forward passes of each image, as the text says."""
    found = [re.search(r" in (\d+) forward passes: ", line) for line in record.lines]
    return [int(match[1]) for match in found if match]
