"""Early ends: selectors that commit the first sure end token, or a whole block that has converged.

`EosThreshold`: a canvas is longer than the answers it is for; Bao et al., "Learning to Parallel:
Accelerating Diffusion Large Language Models via Learnable Parallel Decoding", 2025, arXiv
2509.25188, cut it where the end is predicted (EoTP). Departures: cutting is an option of its own
(`drop_suffix`); all end tokens together have to be likely enough, at the first such slot and not at
the likeliest; the slot's token is drawn like any other's, so that a row ends only where an end
token was drawn; per row.

`ConvergedBlock`: everything that is open, once the likeliest tokens stay the same and are
confident. Source: the stopping criterion "stable and confident" of DiffusionGemma in transformers
5.23. Departures: there the likeliest tokens of the whole canvas end it; here a row's open slots of
the active block are committed as they are drawn, and the divergence bound charges them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.selector import Selector, SelectorState


@dataclass(frozen=True)
class EosThreshold(Selector):
    """The first open slot of the active block whose end tokens have `threshold` together."""

    threshold: float

    def select(self, predictions: SlotPredictions, state: SelectorState) -> Tensor:
        ends = state.run.canvas.stop_tokens
        assert ends is not None
        ends = ends[ends < predictions.logits.shape[-1]].unique()
        probability = predictions.logits.softmax(-1)[..., ends].sum(-1)  # [B, Q]
        is_sure = predictions.is_open & (probability >= self.threshold)
        return is_sure & (is_sure.cumsum(1) == 1)

    def rank(self, predictions: SlotPredictions) -> Tensor:
        return -predictions.slots.float()


@dataclass(frozen=True)
class ConvergedBlock(Selector):
    """All open slots of a row's active block, where no likeliest token has changed since the pass
    before and the slots' entropies are below `entropy` nats on average; none otherwise.
    """

    entropy: float

    def select(self, predictions: SlotPredictions, state: SelectorState) -> Tensor:
        is_open = predictions.is_open
        likeliest = predictions.logits.argmax(-1)  # [B, Q]
        before = state.saved.get(self, likeliest.new_full(likeliest.shape, -1))
        state.saved[self] = likeliest
        is_same = ((likeliest == before) | ~is_open).all(1) & ~state.is_new_block
        total = torch.where(is_open, predictions.entropy, 0.0).sum(1)
        is_sure = total < self.entropy * is_open.sum(1)
        return is_open & (is_same & is_sure)[:, None]
