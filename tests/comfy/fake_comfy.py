"""ComfyUI as far as the nodes touch it, for tests without one.

Written from what a ComfyUI 0.8 was seen to do; `test_server.py` holds the nodes to a real one.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


class Interrupted(Exception):
    """ComfyUI's own derives from `Exception` too: a broad `except` would swallow it."""


class FakeComfy:
    """What was reported, and the wish to stop.

    Attributes:
        reports: (done, total, image or None), in order.
        room: (bytes, device) that was asked for, in order.
        stop_at: number of the check that raises, from 1; 0 never does.
        checks: so far.
    """

    def __init__(self) -> None:
        self.reports: list[tuple[int, int, Any]] = []
        self.room: list[tuple[int, Any]] = []
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
        free_memory=lambda size, device: fake.room.append((size, device)),
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
