"""SamplingParams: from raw logits to the target distribution of a token, in one fixed order.

Order: guidance, structural mask, logits processor, temperature, top-k, top-p, min-p; last, slots
whose token is known in advance become certain. Every exactness guarantee speaks of the resulting
distribution. Nothing is filtered a second time, residuals included.

Sources: classifier-free guidance, Ho & Salimans 2022 (arXiv 2207.12598); top-k, Fan et al. 2018
(arXiv 1805.04833); top-p, Holtzman et al. 2019 (arXiv 1904.09751); min-p, Nguyen et al. 2024 (arXiv
2407.01082).

Departures: the structural mask comes before every truncation, those of a logits processor included,
so that top-k counts only tokens that are allowed and never leaves none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mmaccel.checks import check_int, check_number
from mmaccel.contracts import Layout
from mmaccel.errors import OptionError, ShapeError
from mmaccel.kernels.truncation import guide, make_certain, truncate

Processor = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(scores `[B, W, V]`, tokens `[B, N]` int64, columns `[B, W]` int64) -> scores `[B, W, V]`. The
prefix of window entry (b, w) is `tokens[b, :columns[b, w]]`, left-padded with -1."""

_COLDEST = 1e-30  # scores of 1e8 divided by less would not be finite in float32


@dataclass(frozen=True)
class SamplingParams:
    """How one run turns logits into the distribution of a token.

    Args:
        guidance_scale: s in ``u + s (c - u)`` on raw logits; 1 leaves the conditional branch alone.
        temperature: 0, which takes the most likely token (the lowest id at a tie), or >= 1e-30.
        top_k: keep the k most likely tokens (and those tied with the k-th); None keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches this; in (0, 1] or
            None.
        min_p: keep tokens at least this share of the most likely one's probability; in [0, 1] or
            None.
        processor: a logits processor; it runs after guidance and the structural mask, and before
            everything else.

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
        check_number("guidance_scale", self.guidance_scale, -math.inf, math.inf, "1 turns it off")
        check_number(
            "temperature",
            self.temperature,
            0,
            math.inf,
            "0 is greedy, 1 the model's own distribution",
        )
        if 0 < self.temperature < _COLDEST:
            raise OptionError(
                f"temperature: expected 0 or a number >= {_COLDEST:g}, received "
                f"{self.temperature!r}, by which scores cannot be divided; 0 is greedy"
            )
        if self.top_k is not None:
            check_int("top_k", self.top_k, 1, hint="None keeps all")
        if self.top_p is not None:
            check_number("top_p", self.top_p, 0, 1, "1 keeps all", above_low=True)
        if self.min_p is not None:
            check_number("min_p", self.min_p, 0, 1, "0 keeps all")
        for name in ("guidance_scale", "temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if value is not None:  # fractions and numbers of arrays become floats
                object.__setattr__(self, name, float(value))

    def apply(
        self,
        logits: Tensor,
        branches: int,
        tokens: Tensor,
        columns: Tensor,
        slots: Tensor,
        layout: Layout | None,
    ) -> Tensor:
        """Raw logits of all branches to the scores of the target distribution.

        Args:
            logits: `[R, W, V]`, any float dtype, branch-major.
            branches: G.
            tokens: `[B, N]` int64, prompt and tokens so far, drafts included; -1 is padding.
            columns: `[B, W]` int64, length of each entry's prefix in `tokens`.
            slots: `[B, W]` int64, the slot each entry predicts.
            layout: what is known about the slots.

        Returns:
            `[B, W, V]` float32; its softmax is the target distribution, -inf marks impossible
            tokens.

        Raises:
            ShapeError: if the number of branches does not suit the guidance scale.
        """
        scores = self.to_processed_scores(logits, branches, tokens, columns, slots, layout)
        return self.finish_scores(scores, slots, layout)

    def to_processed_scores(
        self,
        logits: Tensor,
        branches: int,
        tokens: Tensor,
        columns: Tensor,
        slots: Tensor,
        layout: Layout | None,
    ) -> Tensor:
        """The steps of `apply` up to the logits processor; same arguments, `[B, W, V]` float32."""
        scores = self.to_model_scores(logits, branches, slots, layout)
        return scores if self.processor is None else self.processor(scores, tokens, columns)

    def finish_scores(self, scores: Tensor, slots: Tensor, layout: Layout | None) -> Tensor:
        """The steps of `apply` after the logits processor: scores `[B, W, V]` to the same shape.

        `slots` is `[B, W]` int64, as in `apply`.
        """
        scores = self.to_target_scores(scores)
        forced = layout.forced(slots) if layout is not None else None
        return scores if forced is None else make_certain(scores, forced)

    def to_model_scores(
        self, logits: Tensor, branches: int, slots: Tensor, layout: Layout | None
    ) -> Tensor:
        """Raw logits `[R, W, V]` under guidance and the structural mask, `[B, W, V]` float32."""
        self.check_branches(branches)
        scores = guide(logits.float(), branches, self.guidance_scale)
        allowed = layout.allowed(slots) if layout is not None else None
        return scores if allowed is None else scores.masked_fill(~allowed, -math.inf)

    def to_target_scores(self, scores: Tensor) -> Tensor:
        """Temperature, top-k, top-p and min-p on `[B, W, V]` float32."""
        return truncate(scores, self.temperature, self.top_k, self.top_p, self.min_p)

    def impossible(self, vocab_size: int) -> Tensor | None:
        """`[S]` int64, ids below `vocab_size` that no prefix makes possible, or None.

        The logits processor names them in its attribute `impossible`; they need not be drafted.
        """
        ids: Tensor | None = getattr(self.processor, "impossible", None)
        return None if ids is None else ids[(ids >= 0) & (ids < vocab_size)]

    def check_branches(self, branches: int) -> None:
        """Raise ShapeError unless the number of branches suits the guidance scale."""
        if branches != 2 and not (branches == 1 and self.guidance_scale == 1.0):
            raise ShapeError(
                f"guidance: expected 2 branches for guidance_scale {self.guidance_scale}, "
                f"received {branches}; put the unconditional prompts after the conditional "
                "ones and set branches=2"
            )
