"""SamplingParams: from raw logits to the target distribution of a token, in one fixed order.

Order: guidance, structural mask, logits processor, temperature, top-n-sigma, top-H, top-k, top-p,
min-p, eta; last, slots whose token is known in advance become certain. Every exactness guarantee
speaks of the resulting distribution. Nothing is filtered a second time, residuals included.

Sources: guidance, Ho & Salimans 2022 (arXiv 2207.12598); top-k, Fan et al. 2018
(arXiv 1805.04833); top-p, Holtzman et al. 2019 (arXiv 1904.09751); min-p, Nguyen et al. 2024 (arXiv
2407.01082). Those of the other rules stand in `mmaccel.kernels.adaptive`.

Departures: the structural mask comes before every truncation, those of a logits processor included,
so that top-k counts only tokens that are allowed and never leaves none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mmaccel.checks import ANY_INT, MANY, check_fields, within
from mmaccel.contracts import GuidedLayout, Layout
from mmaccel.errors import OptionError, ShapeError
from mmaccel.kernels.adaptive import (
    cool_by_divergence,
    cool_by_entropy,
    keep_above_eta,
    keep_above_noise,
    keep_entropy_share,
)
from mmaccel.kernels.truncation import guide, make_certain, truncate

Processor = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(scores `[B, W, V]`, tokens `[B, N]` int64, columns `[B, W]` int64) -> scores `[B, W, V]`. The
prefix of window entry (b, w) is `tokens[b, :columns[b, w]]`, left-padded with -1."""

FILTERS = ("top_k", "top_p", "min_p")
"""Rules that the sample kernel applies too; None turns one off."""
ADAPTIVE = (
    "top_n_sigma",
    "top_h",
    "eta_cutoff",
    "entropy_temperature",
    "divergence_temperature",
)
"""Rules that no kernel applies: a run that has one draws in separate steps. None turns one off."""

_COLDEST = 1e-30  # scores of 1e8 divided by less would not be finite in float32


@dataclass(frozen=True)
class SamplingParams:
    """How one run turns logits into the distribution of a token.

    Args:
        guidance_scale: s in ``u + s (c - u)`` on raw logits; 1 leaves the conditional branch alone.
        temperature: 0, which takes the most likely token (the lowest id at a tie), or >= 1e-30.
        top_k: keep the k most likely tokens (and those tied with the k-th); None keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches this.
        min_p: keep tokens at least this share of the most likely one's probability.
        top_n_sigma: keep scores at most this many standard deviations below the largest.
        top_h: keep the likeliest tokens that make up this share of the entropy, 100 at most.
        eta_cutoff: epsilon; tokens below a probability ``min(epsilon, sqrt(epsilon) exp(-H))`` go.
        entropy_temperature: theta of EDT: the temperature is multiplied by ``0.8 ** (theta / H)``,
            with the entropy H before any temperature.
        divergence_temperature: nats between both guidance branches that halve the temperature.
        spread: N of arithmetic sampling: N rows of one seed draw evenly spread samples, each with
            the right distribution; for `Autoregressive` and `Jacobi`.
        processor: a logits processor, which runs after guidance and the structural mask.
    """

    guidance_scale: float = within(1.0, -MANY, hint="1 turns it off")
    temperature: float = within(
        1.0, 0, math.inf, hint="0 is greedy, 1 the model's own distribution"
    )
    top_k: int | None = within(None, 1, ANY_INT, "None keeps all")
    top_p: float | None = within(None, 0, 1, "1 keeps all", above_low=True)
    min_p: float | None = within(None, 0, 1, "0 keeps all")
    top_n_sigma: float | None = within(None, hint="1 is usual, None turns it off", above_low=True)
    top_h: float | None = within(None, 0, 1, "0.4 is usual, None turns it off", above_low=True)
    eta_cutoff: float | None = within(
        None, 0, 1, "0.0003 to 0.004 is usual, None turns it off", above_low=True, below_high=True
    )
    entropy_temperature: float | None = within(
        None, hint="0.1 to 1 is usual, None turns it off", above_low=True
    )
    divergence_temperature: float | None = within(
        None, hint="1 halves it at a nat, None turns it off", above_low=True
    )
    spread: int | None = within(None, 2, ANY_INT, "the number of rows that share a seed")
    processor: Processor | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if 0 < self.temperature < _COLDEST:
            raise OptionError(
                f"temperature: expected 0 or a number >= {_COLDEST:g}, received "
                f"{self.temperature!r}, by which scores cannot be divided; 0 is greedy"
            )
        for name in ("guidance_scale", "temperature", "top_p", "min_p", *ADAPTIVE):
            value = getattr(self, name)
            if value is not None:  # fractions and numbers of arrays become floats
                object.__setattr__(self, name, float(value))

    def apply(
        self,
        logits: Tensor,  # [R, W, V], any float dtype, branch-major
        branches: int,
        tokens: Tensor,  # [B, N] int64, prompt, tokens and drafts; -1 is padding
        columns: Tensor,  # [B, W] int64, length of each entry's prefix in `tokens`
        slots: Tensor,  # [B, W] int64, the slot each entry predicts
        layout: Layout | None,
    ) -> Tensor:
        """Scores `[B, W, V]` float32: logits of the target distribution; -inf is impossible."""
        scores = self.to_processed_scores(logits, branches, tokens, columns, slots, layout)
        return self.finish_scores(scores, slots, layout, self.find_cooling(logits))

    @property
    def adaptive(self) -> tuple[str, ...]:
        """Names of the rules in use that no kernel applies; at temperature 0 none matters."""
        if self.temperature == 0:
            return ()
        return tuple(name for name in ADAPTIVE if getattr(self, name) is not None)

    @property
    def without_kernel(self) -> tuple[str, ...]:
        """Names of what is in use and takes the scores themselves, which no kernel writes."""
        return (*self.adaptive, "spread") if self.is_spread else self.adaptive

    @property
    def is_spread(self) -> bool:
        """Whether rows of a seed draw evenly spread samples."""
        return self.spread is not None and self.temperature > 0

    @property
    def rules(self) -> tuple[float | None, ...]:
        """The values of all rules that change a temperature or take tokens away."""
        return tuple(getattr(self, name) for name in (*FILTERS, *ADAPTIVE))

    def find_cooling(self, logits: Tensor) -> Tensor | None:
        """The temperature's factor `[B, W, 1]` or None; logits of both branches `[2 B, W, V]`."""
        if self.temperature == 0 or self.divergence_temperature is None:
            return None
        return cool_by_divergence(logits.float(), self.divergence_temperature)

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

    def finish_scores(
        self, scores: Tensor, slots: Tensor, layout: Layout | None, cooling: Tensor | None = None
    ) -> Tensor:
        """The steps of `apply` after the logits processor, on scores `[B, W, V]`."""
        scores = self.to_target_scores(scores, cooling)
        forced = layout.forced(slots) if layout is not None else None
        return scores if forced is None else make_certain(scores, forced)

    def to_model_scores(
        self, logits: Tensor, branches: int, slots: Tensor, layout: Layout | None
    ) -> Tensor:
        """Raw logits `[R, W, V]` under guidance and the structural mask, `[B, W, V]` float32."""
        self.check_branches(branches)
        scale: float | Tensor = self.guidance_scale
        if branches == 2 and isinstance(layout, GuidedLayout):
            scale = 1 + layout.guidance_share(slots)[..., None] * (scale - 1)
        scores = guide(logits.float(), branches, scale)
        allowed = layout.allowed(slots) if layout is not None else None
        return scores if allowed is None else scores.masked_fill(~allowed, -math.inf)

    def to_target_scores(self, scores: Tensor, cooling: Tensor | None = None) -> Tensor:
        """Temperature and all that takes tokens away, on `[B, W, V]` float32."""
        if not self.adaptive:
            return truncate(scores, self.temperature, self.top_k, self.top_p, self.min_p)
        scores = scores / self._find_temperature(scores, cooling)
        if self.top_n_sigma is not None:
            scores = keep_above_noise(scores, self.top_n_sigma)
        if self.top_h is not None:
            scores = keep_entropy_share(scores, self.top_h)
        scores = truncate(scores, 1.0, self.top_k, self.top_p, self.min_p)
        return scores if self.eta_cutoff is None else keep_above_eta(scores, self.eta_cutoff)

    def _find_temperature(self, scores: Tensor, cooling: Tensor | None) -> Tensor | float:
        """The temperature of every slot, `[B, W, 1]` or one for all."""
        temperature: Tensor | float = self.temperature
        if self.entropy_temperature is not None:
            temperature = temperature * cool_by_entropy(scores, self.entropy_temperature)
        if cooling is not None:
            temperature = temperature * cooling
        if isinstance(temperature, float):
            return temperature
        return temperature.clamp(min=_COLDEST)

    def impossible(self, vocab_size: int) -> Tensor | None:
        """`[S]` int64, ids that the logits processor calls `impossible`, not to be drafted."""
        ids: Tensor | None = getattr(self.processor, "impossible", None)
        return None if ids is None else ids[(ids >= 0) & (ids < vocab_size)]

    def check_branches(self, branches: int) -> None:
        if branches != 2 and self.divergence_temperature is not None:
            raise ShapeError(
                "divergence_temperature: expected 2 branches, whose divergence it reads, received "
                f"{branches}; set a guidance_scale other than 1, or leave it out"
            )
        if branches != 2 and not (branches == 1 and self.guidance_scale == 1.0):
            raise ShapeError(
                f"guidance: expected 2 branches for guidance_scale {self.guidance_scale}, "
                f"received {branches}; put the unconditional prompts after the conditional "
                "ones and set branches=2"
            )
