"""PixelPrune: N. Wang et al., 2026 (arXiv:2604.00886), and the authors' code. In the order of
reading, a patch is predicted from its left neighbour A, the one above B and the one between them C,
as in LOCO-I (JPEG-LS): B where C is like A and not like B, A otherwise. One that is like its
prediction goes: no pixel differs by more than the threshold tau. A patch that went is compared as
the patch that stands for it, so that differences do not add up.

Departures: tau is a difference of the processor's normalised pixels, where the paper's is one of
pixels in [0, 1] (0 is the same). Each frame of a video is predicted alone. With a budget, which the
paper lacks, patches go until it is met, those that differ least from their predictions first.

Shapes: **B** images, tiles or frames, **N** patches, **P** values of a patch's pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.reduction.visual_tokens.context import VisualContext
from mmaccel.reduction.visual_tokens.contract import Stage, TokenReducer
from mmaccel.reduction.visual_tokens.plan import Plan, merge_tokens
from mmaccel.reduction.visual_tokens.selection import itself, top


@dataclass(frozen=True)
class PixelPrune(TokenReducer):
    """Drops patches that repeat a neighbour, before the encoder; what is left has the positions
    that it had. A patch is one visual token's part of the image. `keep` and `n_keep` may be left
    out: they are the most that stays. For screens and documents.

    Args:
        threshold: the largest difference of two pixels that counts as none.

    Loses: on photographs, which repeat nothing; on backgrounds that the processor resized; where
    equal things are counted. Chameleon is refused.
    Figures: of a painted page 448 of 2943 tokens stay at threshold 0; `scenes-vqa`, 22 % kept: 85.5
    % right of 97.0.
    """

    threshold: float = within(0.0, hint="0 drops repetitions alone")

    stage: ClassVar[Stage] = "pixels"
    needs_budget: ClassVar[bool] = False

    needs = frozenset({"pixels", "grid"})

    def score(self, context: VisualContext) -> Tensor:
        """The largest difference from the prediction, `[B, N]`; infinite where there is none."""
        return self._predict(context)[0]

    def limit(self, scores: Tensor, context: VisualContext, budget: Tensor) -> Tensor:
        differs = (scores > self.threshold) & context.valid
        return budget.minimum(differs.sum(1))

    def select(self, scores: Tensor, context: VisualContext, budget: Tensor) -> Plan:
        """A patch `[B, N]` that goes is merged into the one that stands for it."""
        kept = top(scores, context.valid, budget)
        target = self._predict(context)[1].where(~kept, itself(kept))
        for _ in range(kept.shape[1].bit_length()):  # of a target that went, its own target
            target = target.gather(1, target)
        return merge_tokens(target, context.valid, mass=kept.float(), size=context.size)

    def _predict(self, context: VisualContext) -> tuple[Tensor, Tensor]:
        """Differences from predictions, and the patches that predict, both `[B, N]`: all patches
        with one sum of row and column at once, as they depend on those left and above.
        """
        x = context.x  # [B, N, P]
        valid = context.valid
        width = context.column.amax(1, keepdim=True) + 1
        index = itself(valid)
        left = (index - 1).clamp(0)  # patches are in the order of reading
        up = (index - width).clamp(0)
        has_left = (context.column > 0) & valid.gather(1, left)
        has_up = (context.row > 0) & valid.gather(1, up)
        difference = torch.full(x.shape[:2], torch.inf, device=x.device, dtype=torch.float32)
        predictor = valid.int().argmax(1, keepdim=True).repeat(1, x.shape[1])
        stands = index.clone()  # for each patch, the one that is shown in its place
        wave = (context.row + context.column).where(valid & (has_left | has_up), -1)
        for step in range(1, int(wave.max()) + 1):
            b, n = (wave == step).nonzero().unbind(1)
            a = stands[b, left[b, n]]
            above = stands[b, up[b, n]]
            corner = stands[b, left[b, up[b, n]]]
            from_a = self._differ(x[b, corner], x[b, a])
            from_above = self._differ(x[b, corner], x[b, above])
            is_edge = (from_a <= self.threshold) & (from_above > self.threshold)
            is_edge &= has_left[b, n] & has_up[b, n]
            source = above.where(is_edge | ~has_left[b, n], a)
            difference[b, n] = self._differ(x[b, n], x[b, source])
            predictor[b, n] = source
            stands[b, n] = source.where(difference[b, n] <= self.threshold, n)
        return difference, predictor

    @staticmethod
    def _differ(first: Tensor, second: Tensor) -> Tensor:
        """The largest difference of pixels `[..., P]`."""
        return (first.float() - second.float()).abs().amax(-1)
