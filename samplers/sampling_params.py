"""SamplingParams: from raw logits to the law a token is drawn from, once and in one order.

Order: guidance, structural mask, prefix-dependent processor, temperature, top-k, top-p, min-p;
last, slots whose token is known in advance become certain. What leaves here is the target law of
every exactness claim; nothing is filtered a second time, a residual least of all.

Sources: classifier-free guidance, Ho & Salimans 2022 (arXiv 2207.12598); top-k, Fan et al. 2018
(arXiv 1805.04833); top-p, Holtzman et al. 2019 (arXiv 1904.09751); min-p, Nguyen et al. 2024 (arXiv
2407.01082).

Departures: the structural mask comes before everything that looks at the scores as a law, a
processor's truncation included, so that top-k counts tokens that may stand there and never leaves
none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from mmaccel.contracts import Layout
from mmaccel.errors import OptionError, ShapeError
from mmaccel.kernels.truncation import guide, make_certain, truncate

Processor = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(scores `[B, W, V]`, line `[B, N]` int64, columns `[B, W]` int64) -> scores `[B, W, V]`. The
prefix of window entry (b, w) is `line[b, :columns[b, w]]`, where -1 stands for padding on the
left."""

_NEVER = float("-inf")
_COLDEST = 1e-30  # scores of 1e8 divided by less would not be finite in float32


def _is_within(value: Any, low: float, high: float) -> bool:
    """Whether a value is a number that a float can hold in low..high; True and False are none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        number = float(value)
    except OverflowError:
        return False
    return math.isfinite(number) and low <= number <= high


@dataclass(frozen=True)
class SamplingParams:
    """The filters of one run.

    Args:
        guidance_scale: s in ``u + s (c - u)`` on raw logits; 1 leaves the conditional branch alone.
        temperature: 0, which takes the most likely token (the lowest id at a tie), or >= 1e-30.
        top_k: keep the k most likely tokens (and those tied with the k-th); None keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches this; in (0, 1] or
            None.
        min_p: keep tokens at least this share of the most likely one's probability; in [0, 1] or
            None.
        processor: a function of scores and prefix, run after guidance and the structural mask and
            before everything else.

    Raises:
        OptionError: for a value outside its domain.
    """

    guidance_scale: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    processor: Processor | None = None

    def __post_init__(self) -> None:
        if not _is_within(self.guidance_scale, -math.inf, math.inf):
            raise OptionError(
                f"guidance_scale: expected a finite number, received {self.guidance_scale!r}; "
                "1 turns it off"
            )
        if not _is_within(self.temperature, 0, math.inf):
            raise OptionError(
                f"temperature: expected a number >= 0, received {self.temperature!r}; "
                "0 is greedy, 1 the model's own law"
            )
        if 0 < self.temperature < _COLDEST:
            raise OptionError(
                f"temperature: expected 0 or a number >= {_COLDEST:g}, received "
                f"{self.temperature!r}, by which scores cannot be divided; 0 is greedy"
            )
        if self.top_k is not None and not (
            isinstance(self.top_k, Integral) and _is_within(self.top_k, 1, math.inf)
        ):
            raise OptionError(
                f"top_k: expected an integer >= 1 or None, received {self.top_k!r}; None keeps all"
            )
        if self.top_p is not None and not (_is_within(self.top_p, 0, 1) and self.top_p):
            raise OptionError(
                f"top_p: expected a number in (0, 1] or None, received {self.top_p!r}; 1 keeps all"
            )
        if self.min_p is not None and not _is_within(self.min_p, 0, 1):
            raise OptionError(
                f"min_p: expected a number in [0, 1] or None, received {self.min_p!r}; 0 keeps all"
            )
        for name in (
            "guidance_scale",
            "temperature",
            "top_p",
            "min_p",
        ):  # fractions, arrays' numbers
            if getattr(self, name) is not None:
                object.__setattr__(self, name, float(getattr(self, name)))

    def apply(
        self,
        logits: Tensor,
        branches: int,
        line: Tensor,
        columns: Tensor,
        slots: Tensor,
        layout: Layout | None,
    ) -> Tensor:
        """Raw logits of all branches to the scores of the target law.

        Args:
            logits: `[R, W, V]`, any float dtype, branch-major.
            branches: G.
            line: `[B, N]` int64, prompt and tokens so far, drafts included; -1 is padding.
            columns: `[B, W]` int64, length of each entry's prefix in `line`.
            slots: `[B, W]` int64, the slot each entry predicts.
            layout: what is known about the slots.

        Returns:
            `[B, W, V]` float32; its softmax is the target law, -inf marks the impossible.

        Raises:
            ShapeError: if the number of branches does not suit the guidance scale.
        """
        scores = self.to_model_law(logits, branches, slots, layout)
        if self.processor is not None:
            scores = self.processor(scores, line, columns)
        scores = self.to_target_law(scores)
        forced = layout.forced(slots) if layout is not None else None
        return scores if forced is None else make_certain(scores, forced)

    def to_model_law(
        self, logits: Tensor, branches: int, slots: Tensor, layout: Layout | None
    ) -> Tensor:
        """Raw logits `[R, W, V]` under guidance and the structural mask, `[B, W, V]` float32."""
        scores = self._guide(logits.float(), branches)
        allowed = layout.allowed(slots) if layout is not None else None
        return scores if allowed is None else scores.masked_fill(~allowed, _NEVER)

    def to_target_law(self, scores: Tensor) -> Tensor:
        """Temperature, top-k, top-p and min-p on `[B, W, V]` float32."""
        return truncate(scores, self.temperature, self.top_k, self.top_p, self.min_p)

    def impossible(self, vocab_size: int) -> Tensor | None:
        """`[S]` int64, ids below `vocab_size` that the processor's attribute `impossible` names:
        no prefix makes them possible, so that they need not be drafted; None where it has none.
        """
        ids: Tensor | None = getattr(self.processor, "impossible", None)
        return None if ids is None else ids[(ids >= 0) & (ids < vocab_size)]

    def check_branches(self, branches: int) -> None:
        """Refuse a number of branches that does not suit the guidance scale.

        Raises:
            ShapeError: with what suits it.
        """
        if branches != 2 and not (branches == 1 and self.guidance_scale == 1.0):
            raise ShapeError(
                f"guidance: expected 2 branches for guidance_scale {self.guidance_scale}, "
                f"received {branches}; put the unconditional prompts behind the conditional "
                "ones and set branches=2"
            )

    def _guide(self, logits: Tensor, branches: int) -> Tensor:
        self.check_branches(branches)
        return guide(logits, branches, self.guidance_scale)
