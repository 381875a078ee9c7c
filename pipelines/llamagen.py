"""LlamaGen: the transformer of class- and text-conditional picture generation, in windows.

Model: P. Sun et al., "Autoregressive Model Beats Diffusion: Llama for Scalable Image Generation",
2024 (arXiv 2406.06525). No library ships it; parameters have the names of the official checkpoints,
so that their `state_dict` loads as it is. A row's prompt is its condition: one class label, or
caption features of T5; picture tokens behind it stand on a square grid.

Rotary angles are those of a token's row and column, half of a head's pairs each, pairs lying side
by side; positions of the condition have none, and their queries and keys are zero (sic: so the
checkpoints were trained).

Departures: dropout and training are left out.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.pipelines.llamagen_blocks import Block, Caption, Label, LlamaGenConfig


class LlamaGenTransformer(nn.Module):
    """The network; `forward` runs it on embedded tokens."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.config = config
        width = config.caption_dim
        self.cls_embedding = Caption(width, config) if width else Label(config)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(
        self,
        hidden: Tensor,
        turns: Tensor,
        mask: Tensor | None,
        caches: Any,
        start: Tensor | None = None,
    ) -> Tensor:
        """One pass.

        Args:
            hidden: `[R, W, dim]`, embedded tokens.
            turns: `[R, 1, W, D/2, 2]`, cosine and sine of every pair.
            mask: `[R, 1, W, span]`, 0 where a key is seen and -inf elsewhere.
            caches: one per layer; `update(keys, values)` gives `[R, H, span, D]` each.
            start: `[R]` int64, position of each row's first token, for plain causal attention by
                `mmaccel.kernels.window_attention` in place of the mask.

        Returns:
            `[R, W, dim]`, ready for `output`.
        """
        for layer, cache in zip(self.layers, caches):
            hidden = layer(hidden, turns, mask, cache, start)
        return self.norm(hidden)


def resize(model: LlamaGenTransformer, block_size: int) -> LlamaGenTransformer:
    """The same weights, shared, for pictures of `block_size` tokens, a square number."""
    made = copy(model)
    made.config = replace(model.config, block_size=block_size)
    return made


def make_turns(config: LlamaGenConfig) -> Tensor:
    """Cosine and sine for every position, `[cls_token_num + block_size, D/2, 2]` float32."""
    quarter = config.dim // config.n_head // 4
    speeds = config.rope_base ** (-torch.arange(quarter).float() / quarter)
    angles = torch.arange(config.grid)[:, None] * speeds  # [g, D/4]
    by_row = angles[:, None].expand(-1, config.grid, -1)
    by_column = angles[None].expand(config.grid, -1, -1)
    grid = torch.cat([by_row, by_column], -1).flatten(0, 1)  # [g * g, D/2]
    turns = torch.stack([grid.cos(), grid.sin()], -1)
    return torch.cat([turns.new_zeros(config.cls_token_num, *turns.shape[1:]), turns])
