"""What was opened for a token model and lives as long: coarse models, heads."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from mmaccel.samplers.drafting.states import StateModel

T = TypeVar("T")
Opened = dict[tuple[Any, ...], Any]  # by what it was opened for, its source first
_OPENED: WeakKeyDictionary[object, Opened] = WeakKeyDictionary()  # by token model


def opened_for(model: object) -> Opened:
    """What was opened for a token model and lives as long, by what it was opened for."""
    return _OPENED.setdefault(model, {})


def open_once(source: Hashable, model: StateModel, file: Path | None, load: Callable[[], T]) -> T:
    """What a source or a policy loads for a token model: once, and again when its file has
    changed.
    """
    output = model.output_matrix()
    time = file.stat().st_mtime_ns if file is not None and file.is_file() else 0
    key = (source, output.data_ptr(), output.dtype, output.device, time)
    opened = opened_for(model)
    if key not in opened:
        for old in [key for key in opened if isinstance(key[0], type(source))]:
            del opened[old]
        opened[key] = load()
    loaded: T = opened[key]
    return loaded


def share_opened(model: object, opened: Opened) -> None:
    """Let a token model use what was opened for another object over the same weights."""
    _OPENED[model] = opened


def forget_opened(model: object) -> None:
    _OPENED.pop(model, None)
