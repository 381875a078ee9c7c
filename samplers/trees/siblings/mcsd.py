"""MCSD: independent siblings, accepted by recursive rejection.

S. Yang, S. Huang, X. Dai, J. Chen, "Multi-Candidate Speculative Decoding", 2024 (arXiv 2401.06706):
K drafts of a slot are drawn from q with replacement and verified in turn; where x_k is rejected,
the next one is verified against the residual of the target and the same q.

Departures: none. A token drawn again after its rejection has no chance, as the residual lacks it:
on peaked distributions siblings are spent on that, where `RSD` draws others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.samplers.acceptance import draw
from mmaccel.samplers.trees.siblings.contract import (
    Choice,
    SiblingRule,
    SlotNoise,
    Uniforms,
    choose_in_turn,
)


@dataclass(frozen=True)
class MCSD(SiblingRule):
    """Siblings drawn with replacement, verified in turn against the residual.

    Loses: on peaked distributions, where a sibling is drawn twice.
    """

    name = "mcsd"

    def draw(self, p_draft: Tensor, noise: SlotNoise, k: int, first: Tensor | None) -> Tensor:
        n_drawn = k if first is None else k - 1
        uniforms = noise.uniforms(n_drawn)  # [B, n, k]
        drawn = [draw(p_draft, uniforms[..., i]) for i in range(n_drawn)]
        if first is not None:
            drawn.insert(0, first)
        return torch.stack(drawn, -1)

    def choose(
        self, p_target: Tensor, p_draft: Tensor, siblings: Tensor, uniforms: Uniforms
    ) -> Choice:
        return choose_in_turn(p_target, p_draft, siblings, uniforms, lambda same, token: same)
