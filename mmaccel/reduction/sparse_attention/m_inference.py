"""MInference: H. Jiang et al., NeurIPS 2024 (arXiv:2407.02490), section 3: the beginning and nearby
("A-shape"), columns and distances that the prompt's last queries attend to ("vertical-slash"), or
blocks found with mean queries and mean keys ("block").

Departures: the paper searches each head's pattern once, on a text. Here every prompt calibrates: a
key head takes the pattern that keeps most of the last queries' attention, each with `budget` of the
blocks. Columns and distances are counted in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.reduction.sparse_attention.contract import PromptBlocks, PromptMethod


@dataclass(frozen=True)
class MInference(PromptMethod):
    """Computes the blocks of a prompt in each head's pattern.

    Args:
        window: the last queries of a prompt, by which heads are calibrated.

    Loses: in short prompts, and where a prompt's end looks for other things than its middle.
    Figures: SmolLM2-135M: 91, 79, 48 % right at 1/2, 1/4, 1/10.
    """

    budget: float = 0.2
    window: int = within(64, 1, hint="64 suits most models")

    def choose_prompt(self, prompt: PromptBlocks) -> Tensor:
        """The blocks of each key head's best pattern, `[R, H, N, N]` bool."""
        attended = self.attend(prompt)
        patterns = torch.stack(self.patterns(prompt, attended))  # [3, R, H, N, N]
        kept = (patterns * attended).sum((-1, -2))  # [3, R, H]
        best = kept.argmax(0)[None, ..., None, None].expand(-1, -1, -1, *patterns.shape[-2:])
        return patterns.gather(0, best)[0]

    def attend(self, prompt: PromptBlocks) -> Tensor:
        """Attention of the last queries, summed up by tile and block: `[R, H, N, N]`."""
        n_last = min(self.window, prompt.keys.shape[2])
        last = prompt.lengths[:, None] - n_last + torch.arange(n_last, device=prompt.keys.device)
        index = last.clamp(min=0)  # [R, n]
        shape = (*prompt.queries.shape[:3], n_last, prompt.queries.shape[4])
        queries = prompt.queries.gather(3, index[:, None, None, :, None].expand(shape))
        scores = (queries @ prompt.keys[:, :, None].mT).float() * prompt.scale
        at = torch.arange(scores.shape[-1], device=scores.device)
        hidden = at > index[..., None]  # [R, n, S]
        weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
        weights = weights.where((last >= 0)[:, None, None, :, None], 0).sum(2)  # [R, H, n, S]
        by_block = weights.unflatten(-1, (-1, prompt.size)).sum(-1)  # [R, H, n, N]
        tile = (index // prompt.size)[:, None, :, None].expand_as(by_block)
        sums = by_block.new_zeros(*by_block.shape[:2], prompt.n_blocks, prompt.n_blocks)
        return sums.scatter_add(2, tile, by_block)

    def patterns(self, prompt: PromptBlocks, attended: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Blocks `[R, H, N, N]` bool of the three patterns: A-shape, vertical-slash, block."""
        number = torch.arange(prompt.n_blocks, device=attended.device)
        behind = (number[:, None] - number).clamp(min=0)  # [N, N], blocks from a tile to a block
        nearest = prompt.highest(-behind.float().expand_as(attended), self.budget)

        column = attended.sum(2, keepdim=True)  # [R, H, 1, N]
        slash = torch.zeros_like(column[:, :, 0])  # [R, H, N], by distance
        where = behind.flatten().expand(*attended.shape[:2], -1)
        seen = attended.where(prompt.is_before, 0).flatten(2)
        slash = slash.scatter_add(2, where, seen)
        lines = column + slash[:, :, behind]
        crossing = prompt.highest(lines, self.budget)

        return nearest, crossing, prompt.highest(prompt.mean_products, self.budget)
