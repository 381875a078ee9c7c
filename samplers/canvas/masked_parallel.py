"""MaskGIT and its Halton schedule: a fixed number of slots at every pass.

H. Chang et al., "MaskGIT: Masked Generative Image Transformer", CVPR 2022, arXiv 2202.04200,
section 3.2 (cosine schedule); V. Besnier et al., "Halton Scheduler for Masked Generative Image
Transformer", ICLR 2025, arXiv 2503.17076 (arccos schedule).

MaskGIT draws a token for every slot and keeps those whose log-probability, plus Gumbel noise that
shrinks from pass to pass, is highest, which favours likely tokens. Halton takes slots in an order
that does not depend on tokens. After pass t of T the share f(t / T) of the slots is left open:
cosine cos(pi x / 2), arccos arccos(x) / (pi / 2), linear 1 - x.

Departures: `choose="first"` ranks slots by the probability of their likeliest token, so that the
choice does not depend on what is drawn; tokens are drawn with noise frozen per slot; shares are
counted over the active block of every row; at least one slot is committed a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import pi
from typing import Any

import torch
from torch import Tensor

from mmaccel.checks import check_int, one_of, show, within
from mmaccel.errors import OptionError
from mmaccel.results import Exactness
from mmaccel.samplers.canvas.cache_plan import as_plan
from mmaccel.samplers.canvas.policy import SelectorPolicy
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.selector import Selector, SelectorState, top
from mmaccel.samplers.noise import Stream

SCHEDULES = ("cosine", "arccos", "linear")


@dataclass(frozen=True)
class MaskedParallel(SelectorPolicy):
    """Commits a fixed number of slots a pass, by a schedule: MaskGIT and Halton.

    Reference decoder: `Stepwise` in the same order, choosing first; with `steps` None and
    `choose` "first" it decodes the same distribution.

    Args:
        steps: passes a block takes; None: one slot a pass.
        schedule: "cosine", "arccos" or "linear", see `Quota`; None: the order's own.
        order: "confidence" (MaskGIT, cosine), or one that does not depend on logits, "halton"
            (arccos), "random" or "left".
        choose: "last" draws tokens and ranks slots by their probability, "first" ranks without.
        choice: temperature of the noise on the ranks at the first pass, 0 at the last.

    Loses: wherever slots depend on each other, as the number of slots does not ask how sure the
    model is; a choice after the draw favours likely tokens at one slot a pass, too.
    Figures: `scenes-masked`, 12 passes of 256: 22 of 24 captions true, 14 in Halton order.
    """

    steps: int | None = within(12, 1, hint="8 to 32 is usual")
    schedule: str | None = one_of(None, SCHEDULES)
    order: str = one_of("confidence", ("confidence", "halton", "random", "left"))
    choose: str = one_of("last", ("last", "first"))
    choice: float = within(4.5, hint="4.5 is MaskGIT's, 0 turns it off")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is None and self.schedule is not None:
            raise OptionError(
                f"schedule: expected None with one slot a pass, received {show(self.schedule)}; "
                "give steps, or leave the schedule out"
            )

    @property
    def exactness(self) -> Exactness:  # type: ignore[override]
        """Relaxed, but for exactly one slot a pass that is chosen before anything is drawn."""
        chooses_first = self.choose == "first" or self.order != "confidence"
        sees_all = as_plan(self.cache).is_exact and not self.drop_suffix
        ends_early = (self.end_threshold, self.settled) != (None, None)
        is_exact = self.steps is None and chooses_first and sees_all and not ends_early
        return "distribution" if is_exact else "relaxed"

    def selector(self, run: CanvasRun, state: SelectorState) -> Selector:
        by: Selector
        if self.order == "confidence":
            by = NoisyRank(state, self.choice, self.steps, self.choose == "last")
        else:
            by = run.order(self.order)
        if self.steps is None:
            return by
        usual = "arccos" if self.order == "halton" else "cosine"
        return Quota(self.schedule or usual, self.steps, by)


def set_steps(policy: Any, steps: Any) -> MaskedParallel:
    """The policy with the `num_inference_steps` of a diffusers call as its `steps`."""
    if not isinstance(policy, MaskedParallel):
        raise OptionError(
            f"num_inference_steps: expected none under {type(policy).__name__}, which decides "
            f"itself how many passes there are, received {show(steps)}; leave it out, or take "
            "MaskedParallel()"
        )
    check_int("num_inference_steps", steps, 1, hint="8 to 32 is usual")
    return replace(policy, steps=steps)


@dataclass
class Quota(Selector):
    """As many slots as a schedule has, from the top of `by`; the last pass takes the rest."""

    schedule: str
    steps: int
    by: Selector

    def __post_init__(self) -> None:
        self.sees_samples = self.by.sees_samples

    def select(self, predictions: SlotPredictions, state: SelectorState) -> Tensor:
        share = ((state.block_passes + 1).double() / self.steps).clamp(max=1)  # [B]
        still_open = {  # f(t / T)
            "cosine": (share * pi / 2).cos(),
            "arccos": share.arccos() / (pi / 2),
            "linear": 1 - share,
        }[self.schedule]
        n_open = (state.n_block * still_open + 1e-9).floor().long()  # up to rounding
        n_open = torch.where(share < 1, n_open, 0)
        n = (predictions.is_open.sum(1) - n_open).clamp(min=1)
        return top(self.rank(predictions), predictions.is_open, n)

    def rank(self, predictions: SlotPredictions) -> Tensor:
        return self.by.rank(predictions)


@dataclass(eq=False)
class NoisyRank(Selector):
    """The slot with the highest sum of a log-probability and Gumbel noise; ranked by that sum."""

    state: SelectorState  # of the run, which gives the noise
    choice: float  # temperature of the noise at a block's first pass
    steps: int | None  # passes after which it is 0; None: it stays
    sees_samples: bool  # whether the probability is the drawn token's, or the likeliest one's

    def rank(self, predictions: SlotPredictions) -> Tensor:
        probability = predictions.chance if self.sees_samples else predictions.peak
        assert probability is not None
        scale = torch.full_like(probability, self.choice)
        if self.steps is not None:
            done = self.state.block_passes[:, None] + 1
            scale = scale * (1 - done.float() / self.steps).clamp(min=0)
        run = self.state.run
        step = run.bound.row_passes + 1
        noise = run.noise.gumbel(predictions.slots, 1, Stream.CHOICE, step)[..., 0]
        return probability.log() + scale * noise
