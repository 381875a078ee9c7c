"""Calls of attached diffusers pipelines: arguments by name, seeds, one call at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mmaccel.errors import BusyError, OptionError


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


def draw_seed(generator: Any) -> int:
    """A seed drawn from the `generator` argument of a sampled call; None is torch's global one.

    Raises:
        OptionError: no single generator; a list of them, which some pipelines take, is refused.
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        raise OptionError(
            f"generator: expected one torch.Generator, received a {type(generator).__name__}; pass "
            "one, or give attach a seed per row"
        )
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**63 - 1, (), generator=generator, device=device))
