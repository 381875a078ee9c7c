"""Compares the logits of two runs of forward passes; every self-check is a call of `same_logits`.

Differences are in standard deviations of the expected logits. Entries far below a position's
largest are masked: the same ones in both passes, whatever their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.errors import MissingBackendError, UnsupportedModelError, describe
from mmaccel.kernels.device_errors import is_device_error
from mmaccel.samplers.arithmetic import own_arithmetic

_MASKED = 1e3  # below a position's largest logit: as good as -inf, with which heads fill padded ids
_RAISED = (MissingBackendError, UnsupportedModelError)
_ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.08}  # else 0.05
_STRICT = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class Tolerance:
    """How far logits may be apart, in standard deviations of the expected ones."""

    mean: float = math.inf
    largest: float = math.inf

    @staticmethod
    def of(dtype: torch.dtype) -> Tolerance:
        """The rounding between passes of a model in `dtype` with different attention kernels."""
        # bfloat16: transformers' own two of SmolLM2-135M are 0.032 apart, ours is 0.051 from them
        return Tolerance(mean=_ROUNDING.get(dtype, 0.05))

    @staticmethod
    def strict(dtype: torch.dtype) -> Tolerance:
        """The rounding between passes of a model in `dtype` that differ in their width alone."""
        return Tolerance(largest=_STRICT[dtype]) if dtype in _STRICT else Tolerance(mean=2e-2)


@dataclass(frozen=True)
class Difference:
    """How far received logits are from expected ones, in standard deviations of the latter:
    infinite if other entries are masked or NaN; not telling if expected ones are NaN or all equal.
    """

    mean: float
    largest: float
    is_telling: bool = True

    def within(self, tolerance: Tolerance) -> bool:
        return self.mean <= tolerance.mean and self.largest <= tolerance.largest

    def __str__(self) -> str:
        return f"{self.mean:.2g} standard deviations off in the mean, {self.largest:.2g} at most"


@own_arithmetic()
@torch.no_grad()
def same_logits(
    run: Callable[[], Sequence[Tensor]],
    other: Callable[[], Sequence[Tensor]],
    tolerance: Tolerance,
    *,
    where: Tensor | None = None,
    faults: Sequence[str] = (),
) -> str | None:
    """Whether two runs of passes give the same logits: what `other` gives instead, empty where it
    gives the same, and None where that would prove nothing.

    Args:
        run, other: give the logits `[R, T, V]` of each of their passes; `run`'s are right.
        where: `[R, T]` bool, the positions to compare; None compares all.
        faults: what it means, pass by pass, that logits are others.

    Raises:
        MissingBackendError, UnsupportedModelError: by either.
        RuntimeError: the device failed.
    """
    try:
        expected = run()
        differences = [compare_logits(*pair, where) for pair in zip(expected, other(), strict=True)]
    except Exception as error:
        if isinstance(error, _RAISED) or is_device_error(error):
            raise
        return f"a {describe(error)}"
    if not all(difference.is_telling for difference in differences):
        return None
    off = {n: each for n, each in enumerate(differences) if not each.within(tolerance)}
    if not off:
        return ""
    if faults:
        first = min(off)
        return f"{faults[first]} ({off[first]})"
    return f"logits that are {max(off.values(), key=lambda each: each.mean)}"


def compare_logits(expected: Tensor, received: Tensor, where: Tensor | None = None) -> Difference:
    """Compare logits `[R, T, V]` at positions `where` `[R, T]`. Cost: four host syncs."""
    is_double = torch.float64 in (expected.dtype, received.dtype)
    dtype = torch.float64 if is_double else torch.float32
    expected, received = expected.to(dtype), received.to(dtype)
    if where is not None:
        expected, received = expected[where], received[where]  # [E, V]
    possible = is_possible(expected)
    spread = float(expected[possible].std(correction=0)) if bool(possible.any()) else 0.0
    is_telling = not bool(expected.isnan().any()) and spread > 0
    if received.isnan().any() or not torch.equal(is_possible(received), possible):
        return Difference(math.inf, math.inf, is_telling)
    off = (received - expected)[possible].abs()
    mean, largest = (float(off.mean()), float(off.max())) if off.numel() else (0.0, 0.0)
    return Difference(_scaled(mean, spread), _scaled(largest, spread), is_telling)


def is_possible(logits: Tensor) -> Tensor:
    """Which entries of `[..., V]` are not masked by -inf or a number as low."""
    return logits > logits.amax(-1, keepdim=True) - _MASKED


def _scaled(off: float, spread: float) -> float:
    if off == 0:
        return 0.0
    scaled = off / spread if spread > 0 else math.inf
    return scaled if math.isfinite(scaled) else math.inf
