"""Sparse attention carried out: summaries of blocks that follow the cache, and the blocks chosen.

A window overwrites cache indices from its `start` on, so that only the blocks from there to the
window's end are summarised anew; blocks behind the end hold nothing, whatever an earlier window had
there. So a rollback needs no work of its own. A pass that says what it reads is summarised anew in
the blocks that it writes; blocks of which it reads nothing hold nothing.

What methods keep from pass to pass (`LastChoice`), and what a layer has chosen for others, is in
the executor. Summaries are stored by number and then by block, so that scoring them is a product
with contiguous memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.checks import check_answer
from mmaccel.kernels.window_attention import Blocks
from mmaccel.reduction.sparse_attention.contract import (
    AttentionMethod,
    LastChoice,
    LayerBlocks,
    PromptBlocks,
    PromptMethod,
)
from mmaccel.results import BlockCounts


@dataclass(frozen=True)
class _Written:
    """What a pass has done to a layer's cache.

    Attributes:
        blocks: `[R, n]` int64, blocks that it may have written in.
        is_real: `[R, S]` bool, what holds something.
        own: `[R, N]` bool, the blocks of the pass itself.
        start: `[R]` int64, cache index of each row's first query.
    """

    blocks: Tensor
    is_real: Tensor
    own: Tensor
    start: Tensor


class BlockChooser(ABC):
    """Base of what chooses the blocks that a pass attends to in a layer."""

    @abstractmethod
    def choose(
        self, layer: int, query: Tensor, key: Tensor, start: Tensor, *, scale: float
    ) -> Blocks | None:
        """The blocks of a window in a layer; None for all.

        Args:
            layer: its number.
            query: `[R, Hq, W, D]`.
            key: `[R, Hkv, S, D]`, what the layer holds, the window's own keys included.
            start: `[R]` int64, cache index of each row's first query.
            scale: of the scores.
        """


class SparseBlocks(BlockChooser):
    """The blocks that the layers of one run attend to.

    Args:
        method: chooses them.

    Attributes:
        counts: what was left out.
    """

    def __init__(self, method: AttentionMethod) -> None:
        self.method = method
        self.counts = BlockCounts()
        self._summaries: dict[int, Tensor] = {}  # by layer, [R, H, C, N + 1]; the last is scratch
        self._chosen: dict[int, Tensor] = {}  # by layer, of the pass, [R, H, N]
        self._last: dict[int, LastChoice] = {}
        self._begins: dict[int, Tensor] = {}  # by layer, [R]

    def choose(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        start: Tensor,
        *,
        scale: float,
        since: Tensor | None = None,
    ) -> Blocks | None:
        """See `BlockChooser.choose`.

        Args:
            layer, query, key, start, scale: as there.
            since: `[R]` int64, at most `start`: from there on others may have written; None:
                nobody has.

        Cost: a host synchronisation, two with `since`.
        """
        width = query.shape[2]
        size = self.method.block
        if not self._chooses(layer):
            return None
        n_new = (width + size - 2) // size + 1
        first = start // size
        if since is not None:
            n_new += int((first - since // size).max())
            first = since // size
        written = first[:, None] + torch.arange(n_new, device=key.device)  # [R, n]
        ends = (start + width)[:, None]
        is_real = torch.arange(key.shape[2], device=key.device) < ends  # [R, S]
        n_blocks = -(-key.shape[2] // size)
        block = torch.arange(n_blocks, device=key.device)
        own = (block >= start[:, None] // size) & (block < (ends + size - 1) // size)
        return self._choose(layer, query, key, _Written(written, is_real, own, start), scale)

    def choose_read(
        self, layer: int, query: Tensor, key: Tensor, indices: Tensor, reads: Tensor, *,
        scale: float,
    ) -> Blocks | None:  # fmt: skip
        """The blocks of a pass that says what it reads; None for all.

        Args:
            layer, query, key, scale: as in `choose`.
            indices: `[R, W]` int64, cache indices that it has written.
            reads: `[R, 1 or W, S]` bool.

        Cost: two host synchronisations.
        """
        if not self._chooses(layer):
            return None
        n_blocks = -(-key.shape[2] // self.method.block)
        own = torch.zeros(len(key), n_blocks, dtype=torch.bool, device=key.device)
        own.scatter_(1, (indices // self.method.block).clamp(max=n_blocks - 1), True)
        written = (
            own.to(torch.uint8).topk(int(own.sum(1).max()), 1).indices
        )  # and some that are not
        done = _Written(written, reads.any(1), own, indices[:, 0])
        return self._choose(layer, query, key, done, scale)

    def choose_prompt(
        self, layer: int, query: Tensor, key: Tensor, lengths: Tensor, *, scale: float
    ) -> list[Blocks] | None:
        """Of each tile of a prompt's queries the blocks that it sees; None: all see all.

        Args:
            layer: its number.
            query: `[R, Hq, T, D]`, which begin at cache index 0.
            key: `[R, Hkv, S, D]`, S >= T.
            lengths: `[R]` int64, entries of each row's prompt.
            scale: of the scores.

        Cost: a host synchronisation.
        """
        method = self.method
        if not isinstance(method, PromptMethod) or method.is_whole or method.reads_all(layer):
            return None
        size = method.block
        width = query.shape[2]
        surplus = -width % size
        is_real = torch.arange(width, device=key.device) < lengths[:, None]  # [R, T]
        own_keys = key[:, :, :width].where(is_real[:, None, :, None], 0)
        queries = query.where(is_real[:, None, :, None], 0).unflatten(1, (key.shape[1], -1))
        prompt = PromptBlocks(
            layer=layer,
            queries=pad(queries, (0, 0, 0, surplus)),
            keys=pad(own_keys, (0, 0, 0, surplus)),
            lengths=lengths,
            size=size,
            scale=scale,
        )
        own = torch.eye(prompt.n_blocks, dtype=torch.bool, device=key.device)
        chosen = method.choose_prompt(prompt)
        shape = (*key.shape[:2], *own.shape)
        check_answer(f"{method.name}.choose_prompt", chosen, shape, "bool")
        chosen = (chosen | own) & prompt.is_before
        chosen = chosen.expand(-1, key.shape[1], -1, -1)  # [R, H, N, N]
        holds = pad(is_real, (0, surplus)).unflatten(1, (-1, size)).any(2)  # [R, N]
        seen = prompt.is_before & holds[:, :, None] & holds[:, None]
        left_out = (seen[:, None] & ~chosen).sum()
        count = chosen.sum(-1)  # [R, H, N]
        n_left_out, *most = torch.cat([left_out[None], count.amax((0, 1))]).tolist()
        self.counts.left_out += n_left_out
        if n_left_out == 0:
            return None
        found = []
        for tile, n_listed in enumerate(most):
            index = chosen[:, :, tile].to(torch.uint8).topk(n_listed, -1).indices
            found.append(Blocks(index.int(), count[:, :, tile].int(), size))
        return found

    def keep(self, rows: Tensor) -> None:
        """Forget all rows but these, `[n]` int64, in their order."""
        for known in (self._summaries, self._begins):
            for layer, states in known.items():
                known[layer] = states[rows.to(states.device)]
        for last in self._last.values():
            last.select(rows)

    def _chooses(self, layer: int) -> bool:
        method = self.method
        return layer >= method.first_layer and not (method.is_whole or method.chooses_prompts)

    def _choose(
        self, layer: int, query: Tensor, key: Tensor, done: _Written, scale: float
    ) -> Blocks | None:
        """The blocks of a pass.

        Args:
            layer, query, key, scale: as in `choose`.
            done: what the pass has written.
        """
        method = self.method
        size = method.block
        surplus = done.own.shape[1] * size - done.is_real.shape[1]
        holds = pad(done.is_real, (0, surplus)).unflatten(1, (-1, size)).any(2)[:, None]
        source = method.source(layer)
        if source == layer:
            is_first = self._forget_other_rows(layer, done.start)
            chosen = method.choose(
                LayerBlocks(
                    layer=layer,
                    queries=query.unflatten(1, (key.shape[1], -1)).flatten(2, 3),
                    keys=key,
                    summaries=self._follow(layer, key, done.blocks, done.is_real),
                    size=size,
                    is_real=done.is_real,
                    is_own=done.own,
                    start=done.start,
                    begins=self._begins[layer],
                    width=query.shape[2],
                    scale=scale,
                    is_first=is_first,
                    last=self._last[layer],
                    lasts=self._last,
                )
            )
            shape = (*key.shape[:2], done.own.shape[1])
            check_answer(f"{method.name}.choose", chosen, shape, "bool")
            chosen = (chosen & holds).expand(-1, key.shape[1], -1)
            self._chosen[layer] = chosen
        else:
            chosen = self._chosen[source]
        if method.reads_all(layer):
            return None

        # what the window has written is read in any case
        is_empty = ~chosen.any(-1)
        chosen = chosen | (done.own[:, None] & holds)
        count = chosen.sum(-1)
        left_out = (holds & ~chosen).sum()
        most, n_left_out, n_empty = torch.stack([count.max(), left_out, is_empty.sum()]).tolist()
        self.counts.left_out += n_left_out
        self.counts.empty += n_empty
        if n_left_out == 0:
            return None
        index = chosen.to(torch.uint8).topk(most, -1).indices  # those that are chosen come first
        return Blocks(index.int(), count.int(), size)

    def _forget_other_rows(self, layer: int, start: Tensor) -> bool:
        """Begin a layer's memory where it is of other rows, or has not begun; whether it does."""
        known = self._begins.get(layer)
        is_new = known is None or len(known) != len(start)
        if is_new:
            self._begins[layer] = start.clone()
            self._last[layer] = LastChoice()
        return is_new

    def _follow(self, layer: int, key: Tensor, written: Tensor, is_real: Tensor) -> Tensor | None:
        """Summaries `[R, H, N, C]` of what a layer holds after the pass has written; None of
        methods that have none.
        """
        method = self.method
        capacity = key.shape[2]
        size = method.block
        n_blocks = -(-capacity // size)
        known = self._summaries.get(layer)
        is_new = known is None or len(known) != len(key)
        blocks = torch.arange(n_blocks, device=key.device).expand(len(key), -1)
        blocks = blocks if is_new else written
        at = blocks[..., None] * size + torch.arange(size, device=key.device)  # [R, n, P]
        row = torch.arange(len(key), device=key.device)[:, None, None]
        index = at.clamp(max=capacity - 1)
        found = key.transpose(1, 2)[row, index]  # [R, n, P, H, D]
        holds = is_real[row, index] & (at < capacity)
        made = method.summarise(found.permute(0, 3, 1, 2, 4), holds[:, None, ..., None])
        if made is None:
            return None
        shape = (*key.shape[:2], blocks.shape[1], *getattr(made, "shape", ())[3:])
        check_answer(f"{method.name}.summarise", made, shape, "float")
        made = made.mT  # [R, H, C, n]
        if is_new:
            known = made.new_zeros(*made.shape[:3], n_blocks + 1)
        assert known is not None
        if known.shape[3] <= n_blocks:  # the cache has grown
            grown = known.new_zeros(*known.shape[:3], n_blocks + 1)
            grown[..., : known.shape[3] - 1] = known[..., :-1]
            known = grown
        target = blocks.clamp(max=known.shape[3] - 1)[:, None, None].expand_as(made)
        known.scatter_(3, target, made)
        self._summaries[layer] = known
        return known[..., :n_blocks].mT
