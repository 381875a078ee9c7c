"""diffusers' step callbacks: they are shown copies, and what one changes is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mmaccel.checks import show
from mmaccel.errors import OptionError


def call_back(
    callback: Callable[..., Any],
    pipe: Any,
    step: int,
    timestep: int,
    tensors: Mapping[str, Tensor],
    *,
    remedy: str,
    reads_interrupt: bool = False,
) -> None:
    """Call a `callback_on_step_end` with copies of tensors.

    Refused, with a `remedy` for callers that want to change tokens: a tensor that it changed, in
    place or in what it returns, one that it was not shown, and an `_interrupt` that no loop reads.
    """
    shown = {name: tensor.clone() for name, tensor in tensors.items()}
    returned = callback(pipe, step, timestep, dict(shown))
    answers = [*shown.items(), *(returned.items() if isinstance(returned, Mapping) else ())]
    for name, value in answers:
        if name not in tensors:
            raise OptionError(
                f"callback: expected {', '.join(tensors)} in return, received {show(name)} too, "
                "which nothing reads; leave it out"
            )
        check_unchanged(name, value, tensors[name], remedy)
    if is_interrupted(pipe) and not reads_interrupt:
        raise OptionError(
            f"_interrupt: expected False, because a {type(pipe).__name__} does not read it, "
            "received True; raise an exception in the callback to end the call"
        )


def check_unchanged(name: str, value: Any, given: Tensor, remedy: str) -> None:
    if not isinstance(value, Tensor) or not torch.equal(value, given):
        raise OptionError(
            f"callback: expected {name} as it was given, received another one; the tokens of a run "
            f"cannot be changed from outside, {remedy}"
        )


def is_interrupted(pipe: Any) -> bool:
    """Whether a callback has set `pipe._interrupt`, as diffusers' pipelines read it."""
    return bool(getattr(pipe, "_interrupt", False))
