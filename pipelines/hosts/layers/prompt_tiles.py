"""A prompt whose queries see blocks of their own: a selector lists them for each tile of queries
(`SparseBlocks`), which attends as a window at its position does. In a pass of the model's own,
padded rows are moved to the front, so that tiles are those of a row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.kernels import dispatch
from mmaccel.kernels.window_attention import Blocks, window_attention
from mmaccel.pipelines.hosts.layers.gathered_attention import gathered_attention
from mmaccel.pipelines.hosts.layers.sparse import SparseBlocks


def attend_by_tiles(
    tiles: Sequence[Blocks],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    by_kernel: bool,
    **options: Any,
) -> Tensor:
    """Attention `[R, Hq, T, D]` of prompts from index 0 on, as `window_attention`'s, by tiles."""
    outputs = []
    zero = torch.zeros(len(query), dtype=torch.int64, device=query.device)
    for number, blocks in enumerate(tiles):
        first = number * blocks.size  # a tile is as long as a block
        inputs = query[:, :, first : first + blocks.size], key, value, zero + first
        if by_kernel:
            out, _ = dispatch.run(window_attention, *inputs, blocks=blocks, **options)
        else:
            out = gathered_attention(*inputs, blocks=blocks, **options)
        outputs.append(out)
    return torch.cat(outputs, 2)


@dataclass(frozen=True)
class PromptTiles:
    """The selector of prompts in a model's own pass; `mask` `[R, T]` shows their columns."""

    sparse: SparseBlocks
    mask: Tensor

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *,
        mask: Tensor | None, scale: float, softcap: float | None,
    ) -> Tensor | None:  # fmt: skip
        """Attention `[R, Hq, T, D]` of a layer, of arguments as of `Watcher.keep`; None: it attends
        as it would, under another mask than a causal one over its columns. Cost: two host
        synchronisations.
        """
        columns = self.mask.to(query.device)
        width = columns.shape[1]
        if query.shape[2] != width or key.shape[2] != width or not self._is_causal(mask, columns):
            return None
        lengths = columns.sum(1)
        order = (~columns).to(torch.uint8).argsort(dim=1, stable=True)  # [R, T], padding last
        query, key, value = (_arrange(states, order) for states in (query, key, value))
        tiles = self.sparse.choose_prompt(layer, query, key, lengths, scale=scale)
        if tiles is None:
            return None
        out = attend_by_tiles(
            tiles, query, key, value, by_kernel=False, scale=scale, softcap=softcap
        )
        return _arrange(out, order.argsort(dim=1))

    @staticmethod
    def _is_causal(mask: Tensor | None, columns: Tensor) -> bool:
        """Whether a query that is no padding sees the columns up to itself, and no others."""
        if mask is None:
            return bool(columns.all())
        seen = mask if mask.dtype == torch.bool else mask == 0  # [R, 1, T, S]
        width = columns.shape[1]
        expected = columns.new_ones(width, width).tril() & columns[:, None]
        is_other = (seen[:, 0] != expected) & columns[..., None]
        return not bool(is_other.any())


def _arrange(states: Tensor, order: Tensor) -> Tensor:
    """`[R, H, T, D]` in the order `[R, T]` of their columns."""
    return states.gather(2, order[:, None, :, None].expand_as(states))
