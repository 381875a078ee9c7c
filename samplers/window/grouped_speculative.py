"""Grouped speculative decoding: accept a draft by the mass of its group of like tokens. Relaxed.

"Grouped Speculative Decoding for Autoregressive Image Generation", ICCV 2025 (arXiv 2508.07747),
sections 4.1 to 4.3. Comparing P(G) with Q(G) of the group of similar tokens around a draft accepts
more than p(x) with q(x). Groups of the nearest codes: LANTERN, ICLR 2025 (arXiv 2410.03355), and
LANTERN++ (arXiv 2502.06352), in `mmaccel.samplers.window.latent_groups`.

Cost in exactness: accepting with probability a(x) >= min(1, p/q) everywhere and redrawing from
(p - q)+ moves the token's distribution by exactly A - A0 in total variation, with A = sum q a and
A0 = 1 - TV(p, q), the acceptance of the exact rule. `Stats.total_variation` reports the sum.

Departures: the ratio of sums is below min(1, p/q) for some tokens; here a(x) is the larger of both.
Groups are ranks around the draft, which shrink at the ends of the ranking; those by the distance of
code vectors are LANTERN's. A token that filters or a layout exclude is never accepted. Drafts after
the first rejection are redrawn with an exact coupling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.checks import one_of, within
from mmaccel.errors import OptionError
from mmaccel.kernels.truncation import sort_falling
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.acceptance import Coupling, at_tokens, exact_acceptance
from mmaccel.samplers.drafting.contract import DraftSource
from mmaccel.samplers.window.latent_groups import latent_ratio, nearest_codes
from mmaccel.samplers.window.policy import WindowPolicy
from mmaccel.samplers.window.run import WindowRun
from mmaccel.samplers.window.speculative_jacobi import iterate

Ratio = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class GroupedSpeculative(WindowPolicy):
    """GSD: accepts a draft by the mass of its group of like tokens, never less often than the exact
    rule; reports what it spent.

    Args:
        window: tokens processed per pass.
        group: ranks on either side that belong to a token's group; 0 is the exact rule.
        max_gap: members whose probability differs by this or more are left out, in [1e-6, 1].
        groups: "ranks" or "latent" (LANTERN), the nearest codes, for models that declare `codes`.
        neighbours: k of "latent".
        delta: most probability of neighbours that counts, in 0..1, for "latent".
        cap: most that a token's group has as a multiple of the token's own probability (LANTERN++),
            at least 1, in place of `delta`.
        coupling: redraw of drafts after the first rejection, as in `SpeculativeJacobi`.
        drafts: where drafts come from, as in `SpeculativeJacobi`.

    Loses: wherever fidelity to the model matters; in seconds on a CPU, as each slot's vocabulary is
    ranked. `groups="latent"` is for `scenes` and LlamaGen, whose tokenizers have one code a token;
    `cap` bounds what it spends by cap - 1 a slot, `delta` does not.
    Figures: `scenes`, window 32: 6.3 tokens a pass for a total variation of 0.125 a token; 8.0 and
    0.132 over coarse drafts, where 58 % of captions are true (plain loop: 73).
    """

    window: int = 32
    group: int = within(7, 0, 2**31 - 1, "0 is exact")
    max_gap: float = within(0.15, 1e-6, 1, "1 turns the limit off")
    coupling: Coupling = "maximal"
    drafts: str | DraftSource = "neighbour"
    groups: str = one_of("ranks", ("ranks", "latent"))
    neighbours: int = within(16, 1, hint="16 to 1000 is usual")
    delta: float = within(0.1, 0, 1, "0.1 is usual, 0 is exact")
    cap: float | None = within(None, 1, hint="2 doubles a token at most, 1 is exact")

    exactness: ClassVar[Exactness] = "relaxed"

    @property
    def is_capturable(self) -> bool:  # type: ignore[override]
        """A table of neighbours belongs to one run."""
        return self.groups == "ranks"

    def decode(self, run: WindowRun) -> Generation:
        return iterate(run, self.coupling, partial(self.rule, ratio=self._find_ratio(run)))

    def _find_ratio(self, run: WindowRun) -> Ratio | None:
        if self.groups == "latent":
            codes = run.model.vectors("codes")
            if codes is None or len(codes) != run.vocab_size or codes.isnan().any():
                raise OptionError(
                    "groups: expected a model with a code of the image tokenizer for each of its "
                    f"{run.vocab_size} tokens for 'latent', received a "
                    f"{type(run.model).__name__} without them; choose 'ranks'"
                )
            near = nearest_codes(codes, self.neighbours).to(run.rows.tokens.device)
            return partial(latent_ratio, near=near, delta=self.delta, cap=self.cap)
        return None

    def rule(
        self,
        p_target: Tensor,
        p_draft: Tensor,
        drafts: Tensor,
        coins: Tensor,
        ratio: Ratio | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Accept by the draft's group: `[B, K]` bool, and the total variation `[B, K]` that this
        spends on each slot. `ratio` of p and q; None: of groups by ranks.
        """
        exact = exact_acceptance(p_target, p_draft)
        acceptance = exact
        if self.group or self.groups == "latent":
            ratio = ratio or partial(group_ratio, group=self.group, max_gap=self.max_gap)
            acceptance = torch.maximum(exact, ratio(p_target, p_draft))
        acceptance = acceptance.masked_fill(p_target == 0, 0.0)
        spent = (p_draft * (acceptance - exact)).sum(-1)
        return coins < at_tokens(acceptance, drafts), spent


def group_ratio(p_target: Tensor, p_draft: Tensor, group: int, max_gap: float) -> Tensor:
    """min(1, P(G)/Q(G)) `[B, K, V]` for every token's group: of rank r (by p_target, falling) r
    itself and the ranks r-group … r+group-1 whose probability is less than `max_gap` away.
    """
    ordered, order = sort_falling(p_target)
    size = ordered.shape[-1]
    rising = -ordered
    # a gap that counts has a probability of at least `max_gap` above it: few ranks are so high
    n_high = min(size, int(1 / max_gap) + 1)
    high_up = rising[..., :n_high].contiguous()
    head = min(size, n_high + group)  # from this rank on, only `group` limits a group
    low = torch.searchsorted(
        high_up, rising[..., :head] - max_gap, right=True
    )  # close enough above
    high = torch.full_like(low, size)  # first rank too far below
    high[..., :n_high] = torch.searchsorted(rising, high_up + max_gap, right=False)
    rank = torch.arange(head, device=ordered.device).expand_as(low)
    low = torch.maximum(low, rank - group).minimum(rank)  # whatever rounding does to a tiny
    high = torch.minimum(high, rank + group).maximum(rank + 1)  # gap, a token is in its group
    both = torch.stack([ordered, p_draft.gather(-1, order)])
    of_target, of_draft = _between(both, low, high, group)
    # sums of what is at least 0 do not fall, so that no difference is below 0; 0/0 counts as 1
    ratio = (of_target / of_draft).to(p_target.dtype).clamp_(max=1.0).nan_to_num_(nan=1.0)
    return torch.empty_like(ratio).scatter_(-1, order, ratio)


def _between(weights: Tensor, low: Tensor, high: Tensor, group: int) -> Tensor:
    """Sums `[..., V]` of `weights[..., low:high]` by rank. `low` and `high` are of the first M
    ranks; all others have `group` ranks on either side, as far as there are so many.
    """
    *rows, size = weights.shape
    low, high = (rank.expand(*rows, -1) for rank in (low, high))
    head = low.shape[-1]
    above = max(group, 1) if head < size else 0
    # running[r] is the sum of the ranks before r; behind the last rank it stays as it is
    running = weights.new_empty(*rows, 1 + size + above, dtype=torch.float64)
    running[..., 0] = 0
    torch.cumsum(weights, -1, dtype=torch.float64, out=running[..., 1 : 1 + size])
    running[..., 1 + size :] = running[..., size : size + 1]
    sums = running.new_empty(*rows, size)
    sums[..., :head] = running.gather(-1, high) - running.gather(-1, low)
    last = running[..., head + above : size + above]
    first = running[..., head - group : size - group]
    if head < size:
        torch.sub(last, first, out=sums[..., head:])
    return sums
