"""KLASS: slots whose likeliest token is likely enough and whose distribution has become stable.

S. H. Kim et al., "KLASS: KL-Guided Fast Inference in Masked Diffusion Models", NeurIPS 2025, arXiv
2511.05664.

Departures: a slot counts as stable only after that many passes over its block (the release also
counts passes over the block before, and takes no slot for stable in a block's first `steps` - 1
passes); state is kept per row; where no slot qualifies, the most confident one is committed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.samplers.canvas.confident_parallel import Threshold
from mmaccel.samplers.canvas.policy import SelectorPolicy
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.selector import And, Selector, SelectorState


@dataclass(frozen=True)
class KLStable(SelectorPolicy):
    """Commits confident slots whose distribution no longer changes from pass to pass.

    Reference decoder: `Stepwise("confidence")`, which it is with threshold 1 or kl 0.

    Args:
        threshold: least probability of a slot's likeliest token.
        kl: nats that a slot's distribution may diverge from that of the pass before.
        steps: passes for which it has to stay within `kl`.

    Memory: distributions of a block, `[B, Q, V]` float32, are kept from pass to pass.
    Loses: in short blocks: a slot has to be seen `steps` + 1 times before it counts.
    Figures: `grammar-masked`: 98.0 % right in 4.97 passes.
    """

    threshold: float = within(0.9, 0, 1, "0.9 is usual")
    kl: float = within(0.01, hint="0.01 is usual")
    steps: int = within(2, 1, hint="2 is usual")

    def selector(self, run: CanvasRun, state: SelectorState) -> Selector:
        return And(Threshold(self.threshold), Stable(self.kl, self.steps))


@dataclass(frozen=True)
class Stable(Selector):
    """Slots that diverged from the last pass by less than `kl` nats, `steps` passes in a row."""

    kl: float
    steps: int

    def select(self, predictions: SlotPredictions, state: SelectorState) -> Tensor:
        now = predictions.logits.log_softmax(-1)  # [B, Q, V]
        before, n_stable = state.saved.get(self, (now, torch.zeros_like(predictions.slots)))
        terms = torch.where(now > float("-inf"), now.exp() * (now - before), 0.0)
        is_stable = (terms.sum(-1) < self.kl) & ~state.is_new_block[:, None]  # NaN is not stable
        n_stable = torch.where(is_stable, n_stable + 1, 0)
        state.saved[self] = (now, n_stable)
        return predictions.is_open & (n_stable >= self.steps)
