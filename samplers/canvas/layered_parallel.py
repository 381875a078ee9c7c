"""OmniVoice's rule: a schedule that begins slowly, and earlier books of codes before later ones.

H. Zhu et al., "OmniVoice: Towards Omnilingual Zero-Shot Text-to-Speech with Diffusion Language
Models", 2026, arXiv 2604.00688, as in https://github.com/k2-fsa/OmniVoice (`_get_time_steps`,
`_generate_iterative`). Pass s of N takes ceil(L (t(s + 1) - t(s))) of a row's L
slots, with t(s) = shift x / (1 + (shift - 1) x) at x = s / N, and the last one the rest. Slots are
ranked by log p of the likeliest token - penalty book + choice g, g fresh Gumbel noise.

Departures: a row has its own noise at every slot and pass; p leaves out the mask token, which no
slot can take; ties go to the lowest slot; a row takes part in no pass after its last slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.samplers.canvas.masked_parallel import NoisyRank
from mmaccel.samplers.canvas.policy import SelectorPolicy
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.selector import Selector, SelectorState, top


@dataclass(frozen=True)
class LayeredParallel(SelectorPolicy):
    """Commits few slots at first, more later, of codes in books the first books first: OmniVoice.

    Reference decoder: none; it is what the authors of OmniVoice decode with, at temperature 0.

    Args:
        steps: passes of a block.
        shift: below 1, the schedule begins slowly; 1 takes as many slots at every pass.
        penalty: nats that each book is behind the one before. Slots are of one book where the
            layout has no frames of codes.
        choice: temperature of the noise on the ranks, at every pass; 0 turns it off.

    Loses: as `MaskedParallel`, wherever slots depend on each other.
    """

    steps: int = within(32, 1, hint="32 is the authors'")
    shift: float = within(0.1, 0.01, 100, "0.1 is the authors'")
    penalty: float = within(5.0, hint="5 is the authors'")
    choice: float = within(5.0, hint="5 is the authors', 0 turns it off")

    def selector(self, run: CanvasRun, state: SelectorState) -> Selector:
        layout = run.layout
        has_books = layout is not None and layout.frame and not layout.columns
        return Layered(
            self.steps,
            self.shift,
            layout.frame if layout is not None and has_books else 1,
            self.penalty,
            NoisyRank(state, self.choice, None, sees_samples=False),
        )


@dataclass(eq=False)
class Layered(Selector):
    """As many slots as the schedule has, from the top of `by` less a penalty for each book."""

    steps: int
    shift: float
    books: int
    penalty: float
    by: NoisyRank

    def select(self, predictions: SlotPredictions, state: SelectorState) -> Tensor:
        done = state.block_passes.clamp(max=self.steps - 1)  # [B]
        times = self.times.to(done.device)
        share = times[done + 1] - times[done]
        n = (state.n_block * share).ceil().long()
        n = torch.where(done == self.steps - 1, state.n_block, n)
        return top(self.rank(predictions), predictions.is_open, n.clamp(min=1))

    def rank(self, predictions: SlotPredictions) -> Tensor:
        return self.by.rank(predictions) - self.penalty * (predictions.slots % self.books)

    @property
    def times(self) -> Tensor:
        """`[steps + 1]` float64 of float32, in which the authors' code counts."""
        x = torch.linspace(0, 1, self.steps + 1, dtype=torch.float32)
        return (self.shift * x / (1 + (self.shift - 1) * x)).double()
