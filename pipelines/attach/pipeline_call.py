"""Calls of attached diffusers pipelines: arguments by name, one call at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmaccel.errors import BusyError


def check_idle(is_busy: bool) -> None:
    """Raise BusyError while another call of the same pipeline runs."""
    if is_busy:
        raise BusyError(
            "pipeline: expected one call at a time, received one while another runs; make a "
            "second pipeline of the same components for it"
        )


def bind_call(
    own: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Arguments of a call by name: those that were given, and all with defaults.

    None where `own` does not take them; calling `own` then raises the best error message.
    """
    try:
        bound = inspect.signature(own).bind(*args, **options)
    except TypeError:
        return None
    asked = dict(bound.arguments)
    bound.apply_defaults()
    return asked, dict(bound.arguments)
