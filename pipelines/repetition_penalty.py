"""The repetition penalty, over the last tokens or over the whole prefix, for a window at once.

N. S. Keskar et al., "CTRL: A Conditional Transformer Language Model for Controllable Generation",
2019 (arXiv 1909.05858), section 4.1: scores of tokens that occurred are divided by the penalty.
Speech models (OuteTTS: the last 64) and llama.cpp (`repeat_last_n`, 64) count recent tokens only.

Departures: as in transformers, scores below 0 are multiplied, so that a penalty above 1 always
makes a token less likely; a token is punished once, however often it occurred.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.errors import OptionError
from mmaccel.pipelines.recent_tokens import WindowRule, check_window, recent_tokens


@dataclass(frozen=True)
class WindowedRepetitionPenalty(WindowRule):
    """A logits processor: the repetition penalty over the last `window` tokens, prompt included.

    With a window as long as the prefix it is transformers' `RepetitionPenaltyLogitsProcessor` to
    the last bit, padding ids included.

    Args:
        penalty: > 0; above 1 against repetition, 1 changes nothing.
        window: >= 1, tokens looked back at.

    Raises:
        OptionError: for a value outside its domain.
    """

    penalty: float
    window: int

    def __post_init__(self) -> None:
        is_number = isinstance(self.penalty, Real) and not isinstance(self.penalty, bool)
        if not is_number or not 0 < self.penalty < math.inf:
            raise OptionError(
                f"penalty: expected a finite number > 0, received {self.penalty!r}; 1 turns it off"
            )
        object.__setattr__(self, "penalty", float(self.penalty))
        check_window(self.window)

    def over_window(self, scores: Tensor, line: Tensor, columns: Tensor) -> Tensor:
        """All entries of a window; a `Processor` (see `mmaccel.samplers.filters`).

        Args:
            scores: `[B, W, V]`, any float dtype.
            line: `[B, N]` int64; ids outside 0..V-1 are passed over.
            columns: `[B, W]` int64, length of each entry's prefix in `line`.

        Returns:
            `[B, W, V]`, the dtype of `scores`.

        Cost: no host synchronisation; memory for B * W * (V + min(window, N)) entries.
        """
        recent = recent_tokens(line, columns, self.window, scores.shape[-1])
        return _punish(scores, recent, self.penalty)


def punish_prefix(
    scores: Tensor, line: Tensor, columns: Tensor, *, penalty: float, ignored: int = 0
) -> Tensor:
    """What transformers' `RepetitionPenaltyLogitsProcessor` gives at every entry of a window.

    Args:
        scores: `[B, W, V]`, any float dtype.
        line: `[B, N]` int64; ids outside 0..V-1 are passed over.
        columns: `[B, W]` int64, length of each entry's prefix in `line`.
        penalty: > 0.
        ignored: leading columns that do not count.

    Returns:
        `[B, W, V]`, the dtype of `scores`.

    Cost: no host synchronisation; memory for B * W * (V + N) entries.
    """
    before = recent_tokens(line, columns, line.shape[1], scores.shape[-1], ignored)
    return _punish(scores, before, penalty)


def _punish(scores: Tensor, tokens: Tensor, penalty: float) -> Tensor:
    """Scores `[B, W, V]`, tokens `[B, W, K]` in 0..V, where V is none; once for each token."""
    padded = pad(scores, (0, 1))  # [B, W, V + 1]
    found = padded.gather(-1, tokens)
    found = torch.where(found < 0, found * penalty, found / penalty)
    return padded.scatter_(-1, tokens, found)[..., :-1]
