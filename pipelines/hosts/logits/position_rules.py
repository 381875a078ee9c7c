"""Logits processors that read one position's scores alone: rules of `SamplingParams`
(`kernels/adaptive.py`) that transformers' `generate` lacks. Both run before the temperature.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass

from torch import Tensor

from mmaccel.checks import within
from mmaccel.kernels.adaptive import cool_by_entropy, keep_above_noise
from mmaccel.pipelines.hosts.logits.repetition import WindowRule

_COLDEST = 1e-30  # scores of 1e8 divided by less would not be finite in float32


@dataclass(frozen=True)
class TopNSigma(WindowRule):
    """Top-n-sigma, arXiv 2411.07641.

    Args:
        n_sigma: standard deviations below the largest score that a token may be, above 0.
    """

    n_sigma: float = within(MISSING, 0, math.inf, "1 is usual", above_low=True)

    def over_window(self, scores: Tensor, tokens: Tensor, columns: Tensor) -> Tensor:
        return keep_above_noise(scores.float(), self.n_sigma).to(scores.dtype)


@dataclass(frozen=True)
class EntropyTemperature(WindowRule):
    """EDT, arXiv 2403.14541: divides scores by ``0.8 ** (theta / H)``; a temperature follows.

    Args:
        theta: above 0.
    """

    theta: float = within(MISSING, 0, math.inf, "0.1 to 1 is usual", above_low=True)

    def over_window(self, scores: Tensor, tokens: Tensor, columns: Tensor) -> Tensor:
        x = scores.float()
        return (x / cool_by_entropy(x, self.theta).clamp(min=_COLDEST)).to(scores.dtype)
