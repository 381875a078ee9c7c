"""MaskGIT and its Halton schedule: a fixed number of slots at every pass.

H. Chang et al., "MaskGIT: Masked Generative Image Transformer", CVPR 2022, arXiv 2202.04200,
section 3.2; V. Besnier et al., "Halton Scheduler for Masked Generative Image Transformer", ICLR
2025, arXiv 2503.17076.

MaskGIT draws a token for every slot and keeps those whose chance, plus Gumbel noise that grows less
from pass to pass, is highest. That favours likely tokens beyond what the model says of them, with a
perfect model too. Halton takes slots in an order that knows nothing of the tokens.

Departures: `choose="first"` ranks slots by the probability of their likeliest token instead, so
that the choice knows nothing of what is drawn; tokens are drawn with noise frozen per slot, so that
a slot that is passed over draws from its next law with the same noise.

Quotas: so many slots at every pass, whatever the model says of them.

H. Chang et al., "MaskGIT", CVPR 2022, arXiv 2202.04200 (cosine); V. Besnier et al., "Halton
Scheduler for Masked Generative Image Transformer", ICLR 2025, arXiv 2503.17076 (arccos).

After pass t of T the share f(t / T) of the slots is left open: cosine cos(pi x / 2), arccos
arccos(x) / (pi / 2), linear 1 - x. Cosine and arccos take more at every pass: cosine begins with
few, arccos begins evenly and takes its largest share at the last one.

Departures: counted over the active block of every row; at least one slot is committed a pass.

A selector that follows an order of `mmaccel.samplers.canvas.orders`, one slot a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor

from mmaccel.checks import check_choice, check_int, check_number
from mmaccel.errors import OptionError
from mmaccel.results import Exactness
from mmaccel.samplers.canvas.cache_plan import as_plan
from mmaccel.samplers.canvas.orders import Order
from mmaccel.samplers.canvas.policy import SelectorPolicy
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.selector import Selector, SelectorState, top
from mmaccel.samplers.noise import Stream

SCHEDULES = ("cosine", "arccos", "linear")


@dataclass(frozen=True)
class Quota:
    """As many slots as a schedule has for the pass, from the top of a selector's rank.

    Args:
        schedule: one of `SCHEDULES`.
        steps: passes a block takes; the last one commits what is left.
        by: whose rank.
    """

    schedule: str
    steps: int
    by: Selector

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        check_int("steps", self.steps, 1, hint="8 to 32 is usual")

    @property
    def sees_samples(self) -> bool:
        """Whether the rank does."""
        return self.by.sees_samples

    def select(self, seen: SlotPredictions, memory: SelectorState) -> Tensor:
        """See `Selector`."""
        share = ((memory.passes + 1).double() / self.steps).clamp(max=1)  # [B]
        left = {
            "cosine": (share * pi / 2).cos(),
            "arccos": share.arccos() / (pi / 2),
            "linear": 1 - share,
        }[self.schedule]
        n_left = (memory.n_block * left + 1e-9).floor().long()  # up to rounding
        n_left = torch.where(share < 1, n_left, 0)
        n = (seen.is_open.sum(1) - n_left).clamp(min=1)
        return top(self.rank(seen), seen.is_open, n)

    def rank(self, seen: SlotPredictions) -> Tensor:
        """See `Selector`."""
        return self.by.rank(seen)


@dataclass(frozen=True, eq=False)
class ByOrder:
    """The next slot of an order; others rank behind it in that order."""

    order: Order

    @property
    def sees_samples(self) -> bool:
        """Whether the order does."""
        return self.order.name == "sampled"

    def select(self, seen: SlotPredictions, memory: SelectorState) -> Tensor:
        """See `Selector`."""
        return self.order.first(seen)

    def rank(self, seen: SlotPredictions) -> Tensor:
        """See `Selector`."""
        return self.order.score(seen)


@dataclass(frozen=True)
class MaskedParallel(SelectorPolicy):
    """Reference decoder: `Stepwise` in the same order, choosing first; with `steps` None and
    `choose` "first" it decodes that law.

    Args:
        steps: passes a block takes; None: one slot a pass.
        schedule: "cosine", "arccos" or "linear", see `Quota`; None: the order's own.
        order: "confidence" (MaskGIT, cosine), or one that looks at no logits, "halton" (arccos),
            "random" or "left".
        choose: "last" draws tokens and ranks slots by what they are, "first" ranks without.
        choice: temperature of the noise on the ranks at the first pass, 0 at the last.
        block, cache: as in `Stepwise`.
    """

    steps: int | None = 12
    schedule: str | None = None
    order: str = "confidence"
    choose: str = "last"
    choice: float = 4.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None:
            check_int("steps", self.steps, 1, hint="8 to 32 is usual")
        if self.schedule is not None:
            check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("order", self.order, ("confidence", "halton", "random", "left"))
        check_choice("choose", self.choose, ("last", "first"))
        check_number("choice", self.choice, 0, float("inf"), "4.5 is MaskGIT's, 0 turns it off")
        if self.steps is None and self.schedule is not None:
            raise OptionError(
                f"schedule: expected None with one slot a pass, received {self.schedule!r}; "
                "give steps, or leave the schedule out"
            )

    @property
    def exactness(self) -> Exactness:  # type: ignore[override]
        """Relaxed, but for one slot a pass, and never more, that was chosen before anything was
        drawn.
        """
        blind = self.choose == "first" or self.order != "confidence"
        is_whole = as_plan(self.cache).is_exact and not self.drop_suffix
        is_exact = self.steps is None and blind and is_whole and not self.ends
        return "distribution" if is_exact else "relaxed"

    def selector(self, run: CanvasRun, memory: SelectorState) -> Selector:
        """See `SelectorPolicy`."""
        rank: Selector
        if self.order == "confidence":
            rank = NoisyRank(memory, self.choice, self.steps, self.choose == "last")
        else:
            rank = ByOrder(run.order(self.order))
        if self.steps is None:
            return rank
        own = "arccos" if self.order == "halton" else "cosine"
        return Quota(self.schedule or own, self.steps, rank)


class NoisyRank:
    """The slot of the highest logarithm of a probability and Gumbel noise; ranked by that.

    Args:
        memory: of the run, which gives the noise.
        choice: temperature of the noise at a block's first pass.
        steps: passes after which it is 0; None: it stays.
        sees_samples: whether the probability is the drawn token's, or the likeliest one's.
    """

    def __init__(
        self, memory: SelectorState, choice: float, steps: int | None, sees_samples: bool
    ) -> None:
        self._memory, self._sees = memory, sees_samples
        self._choice, self._steps = choice, steps

    @property
    def sees_samples(self) -> bool:
        """See `Selector`."""
        return self._sees

    def select(self, seen: SlotPredictions, memory: SelectorState) -> Tensor:
        """See `Selector`."""
        rank = torch.where(seen.is_open, self.rank(seen), float("-inf"))
        best = rank.argmax(1, keepdim=True)
        return torch.zeros_like(seen.is_open).scatter(1, best, True) & seen.is_open

    def rank(self, seen: SlotPredictions) -> Tensor:
        """See `Selector`."""
        chance = seen.chance if self._sees else seen.peak
        assert chance is not None
        run, done = self._memory.run, self._memory.passes[:, None] + 1
        scale = torch.full_like(chance, self._choice)
        if self._steps is not None:
            scale = scale * (1 - done / self._steps).clamp(min=0)
        noise = run.noise.gumbel(seen.slots, 1, Stream.CHOICE, run.ledger.row_passes + 1)[..., 0]
        return chance.log() + scale * noise
