"""VideoChunks: M. Qin et al., "Video-XL-2", 2025 (arXiv:2506.19225), section 3 (chunk-based
pre-filling).

Departures: chunks are counted in entries from the beginning of the prompt, text included. Between
chunks a tile sees the blocks whose mean key matches its mean query best; the paper's model was
trained with marks of time. Later passes attend to everything; what the paper reloads, whole or
pooled keys of a chunk, is `BiLevelKV`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.reduction.sparse_attention.contract import PromptBlocks, PromptMethod


@dataclass(frozen=True)
class VideoChunks(PromptMethod):
    """Computes the attention of a prompt within chunks, and some of it between them.

    Args:
        budget: the fraction of the blocks before it that a tile sees outside its chunk.
        chunk: entries of a chunk, a multiple of `block`.
        question: the last entries of a prompt, which see everything.

    Loses: in models that were not trained with chunks, in prompts of few chunks, with the question
    in front.
    """

    budget: float = 0.1
    chunk: int = within(1024, 1, hint="give the tokens of a few frames", multiple_of="block")
    question: int = within(64, hint="give the tokens of a question")

    def choose_prompt(self, prompt: PromptBlocks) -> Tensor:
        """A tile's chunk, the best blocks before it, or everything: `[R, H, N, N]` bool."""
        number = torch.arange(prompt.n_blocks, device=prompt.keys.device)
        chunk = number // (self.chunk // self.block)
        is_within = chunk == chunk[:, None]  # [N, N]
        scores = prompt.mean_products.masked_fill(is_within, float("-inf"))
        best = prompt.highest(scores, self.budget)
        lengths = prompt.lengths[:, None]
        ends = torch.minimum((number + 1) * self.block, lengths)  # [R, N]
        asks = ends > lengths - self.question
        return best | is_within | asks[:, None, :, None]
