"""The gate of an MLP, which the specification rounds once more in half precision."""

from __future__ import annotations

from functools import partial

from mmaccel.kernels.gated_act import Activation, gated_act
from tests.kernels.case import Case, Lane


def _widths(kind: Activation, lane: Lane) -> None:
    """Widths around a block, and columns of a larger tensor; gates from -5 to 5."""
    for rows, width in ((1, 1), (3, 100), (1, 1024), (2, 1025)):
        whole = lane.normal(rows, 2 * width + 6, seed=width, spread=1.5)
        lane.compare(gated_act, whole[:, 4 : 4 + 2 * width], kind, tolerance=lane.rounding)


_KINDS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
CASES = [Case(kind, partial(_widths, kind)) for kind in _KINDS]
