"""Draws from the distribution of the nearest slot that a pass has evaluated.

Y. Teng et al., "Accelerating Auto-regressive Text-to-Image Generation with Training-free
Speculative Jacobi Decoding", ICLR 2025 (arXiv 2410.01699), section 3.3.

Departures: drawn from the left neighbour's distribution instead of a copy of its token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmaccel.samplers.drafting.contract import Drafts, DraftSource, Frontier
from mmaccel.samplers.drafting.random_tokens import uniform_scores


@dataclass(frozen=True)
class Neighbour(DraftSource):
    """The scores of the last pass's right-most slot; before the first pass uniform ones."""

    is_capturable = True
    name = "neighbour"

    def propose(self, frontier: Frontier) -> Drafts:
        if frontier.last_scores is None:
            return Drafts(scores=uniform_scores(frontier))
        scores = frontier.last_scores[:, None]  # [B, 1, V]
        if frontier.is_first is not None:
            scores = torch.where(frontier.is_first[:, None, None], uniform_scores(frontier), scores)
        return Drafts(scores=scores)
