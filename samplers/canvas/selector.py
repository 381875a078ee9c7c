"""Selectors: which open slots of a canvas are committed together.

H. Ben-Hamu et al., "Accelerated Sampling from Masked Diffusion Models via Entropy Bounded
Unmasking", NeurIPS 2025, arXiv 2505.24857, sections 3.2 and 4: rank the open slots, take some from
the top. Published rules are combinations: where no slot passes a threshold, the most confident one
is taken (C. Wu et al., "Fast-dLLM", 2025, arXiv 2505.22618, section 3.3); slots are taken that pass
two thresholds (S. H. Kim et al., "KLASS", NeurIPS 2025, arXiv 2511.05664).

Departures: a selector receives sealed predictions, without the tokens that were drawn, unless its
`sees_samples` is True; what it carries from pass to pass is kept per row, in a `SelectorState`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.checks import check_answer
from mmaccel.samplers.canvas.predictions import SlotPredictions

if TYPE_CHECKING:
    from mmaccel.samplers.canvas.run import CanvasRun


@dataclass
class SelectorState:
    """What selectors may use of a run besides the predictions; made by `SelectorState.of`."""

    run: CanvasRun  # of B rows
    n_slots: Tensor  # [B] int64, slots that were open when the row began
    block_start: Tensor  # [B] int64, where the active block began at the last pass
    block_passes: Tensor  # [B] int64, passes before this one over the active block
    n_block: Tensor  # [B] int64, slots that were open when the active block began
    is_new_block: Tensor  # [B] bool, rows whose active block is new at this pass
    # by selector, what it carries to the next pass; it has to forget rows of `is_new_block`
    saved: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, run: CanvasRun) -> SelectorState:
        zeros = torch.zeros_like(run.canvas.base)
        is_open = run.canvas.is_open
        state = cls(run, is_open.sum(1), zeros - 1, zeros, zeros, zeros > 0)
        run.track(state)
        return state

    def restart(self, batch_slots: Tensor) -> None:
        """New rows begin in `batch_slots` `[n]`: their blocks are new, and `saved` is forgotten."""
        self.block_start = self.block_start.index_fill(0, batch_slots, -1)
        # a batch slot that waited for its first row had no open slot at the start
        n_open = self.run.canvas.is_open.sum(1)
        self.n_slots = self.n_slots.index_copy(0, batch_slots, n_open[batch_slots])

    @property
    def n_committed(self) -> Tensor:
        """`[B]` int64, slots committed so far that were open at the start."""
        canvas = self.run.canvas
        return (canvas.is_committed & ~canvas.is_given).sum(1)

    @property
    def spent(self) -> Tensor:
        """`[B]` float64, nats; see `mmaccel.samplers.divergence`."""
        return self.run.bound.nats

    def choose(self, selector: Selector, predictions: SlotPredictions) -> Tensor:
        """What a selector takes, `[B, Q]` bool; to be called once a pass."""
        start = self.run.canvas.start  # adjacent blocks differ in `start` too, and not in `base`
        self.is_new_block = start != self.block_start
        self.block_start = start
        self.block_passes = torch.where(self.is_new_block, 0, self.block_passes)
        n_open = predictions.is_open.sum(1)
        self.n_block = torch.where(self.is_new_block, n_open, self.n_block)
        shown = predictions if selector.sees_samples else predictions.sealed()
        chosen = take(selector, shown, self)
        self.block_passes = self.block_passes + 1
        return chosen


class Selector:
    """A rule for each row alone. This one takes the first slot of its rank, by confidence."""

    sees_samples: bool = False  # it receives what was drawn: the distribution is not exact

    def select(self, predictions: SlotPredictions, state: SelectorState) -> Tensor:
        """`[B, Q]` bool, open slots to commit; where none, the most confident is."""
        return first(self.rank(predictions), predictions.is_open)

    def rank(self, predictions: SlotPredictions) -> Tensor:
        """`[B, Q]` float, the highest first."""
        return predictions.peak


def take(selector: Selector, predictions: SlotPredictions, state: SelectorState) -> Tensor:
    chosen = selector.select(predictions, state)
    is_open = predictions.is_open
    check_answer(f"{type(selector).__name__}.select", chosen, is_open.shape, "bool")
    return chosen & is_open


def rank_by(selector: Selector, predictions: SlotPredictions, state: SelectorState) -> Tensor:
    """A selector's rank `[B, Q]`; NaN is refused at the first pass, where logits are numbers."""
    rank = selector.rank(predictions)
    is_sound = predictions.is_open & ~predictions.has_invalid_logits[:, None]
    counts = is_sound if state.run.bound.passes == 1 else None
    check_answer(f"{type(selector).__name__}.rank", rank, is_sound.shape, "float", counts=counts)
    return rank


def ranked(rank: Tensor, among: Tensor) -> Tensor:
    """`[B, Q]` int64, places of slots by falling `rank`, those not `among` last; ties: lowest."""
    scores = torch.where(among, rank.double(), float("-inf"))
    order = scores.argsort(dim=1, descending=True, stable=True)
    # two sorts, as a rank of -inf among them must come before those not among them
    order = order.gather(1, (~among).gather(1, order).int().argsort(dim=1, stable=True))
    index = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, index)


def top(rank: Tensor, among: Tensor, n: int | Tensor) -> Tensor:
    """The n highest, `[B, Q]` bool; n is a number or `[B]` int64."""
    n = n[:, None] if isinstance(n, Tensor) else n
    return (ranked(rank, among) < n) & among


def first(rank: Tensor, among: Tensor) -> Tensor:
    """The highest of every row that has one, `[B, Q]` bool; the lowest slot of equal ones."""
    best = torch.where(among, rank, float("-inf")).argmax(1, keepdim=True)
    return torch.zeros_like(among).scatter(1, best, True) & among


class _Of(Selector):
    """Made of selectors, all of which are evaluated at every pass; ranked by the first."""

    def __init__(self, *parts: Selector) -> None:
        self.parts = parts
        self.sees_samples = any(part.sees_samples for part in parts)

    def rank(self, predictions: SlotPredictions) -> Tensor:
        return self.parts[0].rank(predictions)


class And(_Of):
    def select(self, predictions: SlotPredictions, state: SelectorState) -> Tensor:
        one, other = self.parts
        return take(one, predictions, state) & take(other, predictions, state)


class Or(_Of):
    def select(self, predictions: SlotPredictions, state: SelectorState) -> Tensor:
        one, other = self.parts
        return take(one, predictions, state) | take(other, predictions, state)


class AtLeast(_Of):
    """What a selector takes, filled up to n slots from the top of its rank."""

    def __init__(self, n: int, selector: Selector) -> None:
        super().__init__(selector)
        self.n = n

    def select(self, predictions: SlotPredictions, state: SelectorState) -> Tensor:
        chosen = take(self.parts[0], predictions, state)
        lacking = (self.n - chosen.sum(1)).clamp(min=0)
        order = rank_by(self.parts[0], predictions, state)
        return chosen | top(order, predictions.is_open & ~chosen, lacking)
