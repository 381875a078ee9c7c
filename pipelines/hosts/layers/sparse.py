"""Sparse attention carried out: summaries of blocks that follow the cache, and the blocks chosen.

A window overwrites cache indices from its `start` on, so only the blocks from there to its end are
summarised anew; those behind hold nothing. A pass that says what it reads has the blocks that it
writes summarised anew; blocks of which it reads nothing hold nothing.

Where tensors are not read on the host, lists are as long as the method says at most, with counts
beside them, in the same tensors from pass to pass, which `forget` clears for the next run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.checks import check_answer
from mmaccel.kernels import dispatch
from mmaccel.kernels.block_scores import block_scores
from mmaccel.kernels.choose_blocks import choose_blocks
from mmaccel.kernels.window_attention import Blocks
from mmaccel.pipelines.hosts.layers.store import WindowLayer
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
    blocks: Tensor  # [R, n] int64, that it may have written in
    is_real: Tensor  # [R, S] bool, what holds something
    own: Tensor  # [R, N] bool, the blocks of the pass itself
    n_own: int  # how many those are at most
    start: Tensor  # [R] int64, cache index of each row's first query


class BlockChooser(ABC):
    @abstractmethod
    def choose(
        self, layer: int, query: Tensor, key: Tensor, start: Tensor, *, scale: float
    ) -> Blocks | None:
        """Blocks of a window `[R, Hq, W, D]` at `start` `[R]`, of keys `[R, Hkv, S, D]`, or all."""


class SparseBlocks(BlockChooser):
    """The blocks that the layers of one run attend to."""

    def __init__(self, method: AttentionMethod, reads_back: bool = True) -> None:
        self.method = method
        self._reads_back = reads_back
        self._counters: dict[torch.device, Tensor] = {}  # [2], blocks left out, choices of none
        self._asked = set[int]()  # layers
        self._summaries: dict[int, Tensor] = {}  # by layer, [R, H, C, N + 1]; the last is scratch
        self._chosen: dict[int, Tensor] = {}  # by layer, of the pass, [R, H, N]
        self._last: dict[int, LastChoice] = {}
        self._begins: dict[int, Tensor] = {}  # by layer, [R]

    @property
    def counts(self) -> BlockCounts:
        """What was left out. Cost: a host synchronisation."""
        counts = [counter.tolist() for counter in self._counters.values()]
        return BlockCounts(*map(sum, zip(*counts, strict=True))) if counts else BlockCounts()

    def begin(self, layer: int, store: WindowLayer, lengths: Tensor) -> None:
        """Summarise a layer's prompt, of `lengths` `[R]` int64 entries if nothing was evicted."""
        if not self._chooses(layer) or self.method.source(layer) != layer:
            return
        key = store.held()[0]
        ends = store.layout.to_index(lengths).to(key.device)
        is_real = torch.arange(key.shape[2], device=key.device) < ends[:, None]
        self._remember(layer, ends)
        self._follow(layer, key, None, is_real)

    def forget(self) -> None:
        """Begin anew, in the same tensors: another run has the same shapes."""
        for tensors in (self._counters, self._summaries, self._begins):
            for tensor in tensors.values():
                tensor.zero_()
        for last in self._last.values():
            last.forget()

    def choose(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        start: Tensor,
        *,
        scale: float,
        since: Tensor | None = None,
        indices: Tensor | None = None,
        reads: Tensor | None = None,
    ) -> Blocks | None:
        """As `BlockChooser.choose`. Cost: a host synchronisation on a CPU, another with `since` or
        `reads`.

        Args:
            since: `[R]` int64, at most `start`: from there on others may have written; None: nobody
                has.
            indices: `[R, W]` int64, cache indices of a pass that says what it reads; None: from
                `start` on.
            reads: `[R, 1 or W, S]` bool, what such a pass reads.
        """
        width = query.shape[2]
        size = self.method.block
        if not self._chooses(layer):
            return None
        n_blocks = -(-key.shape[2] // size)
        if indices is not None and reads is not None:
            is_written = torch.zeros(len(key), n_blocks, dtype=torch.bool, device=key.device)
            is_written.scatter_(1, (indices // size).clamp(max=n_blocks - 1), True)
            n_written = int(is_written.sum(1).max())
            blocks = is_written.to(torch.uint8).topk(n_written, 1).indices  # and some that are not
            written = _Written(blocks, reads.any(1), is_written, n_written, indices[:, 0])
            return self._choose(layer, query, key, written, scale)
        if since is None and self._is_scored(layer, start):
            return self._choose_by_scores(layer, query, key, start, scale)
        n_own = (width + size - 2) // size + 1  # blocks that a window may touch, wherever it begins
        n_written = n_own
        first = start // size
        if since is not None:
            n_written += int((first - since // size).max())
            first = since // size
        blocks = first[:, None] + torch.arange(n_written, device=key.device)  # [R, n]
        ends = (start + width)[:, None]
        is_real = torch.arange(key.shape[2], device=key.device) < ends  # [R, S]
        block = torch.arange(n_blocks, device=key.device)
        is_windows = (block >= start[:, None] // size) & (block < (ends + size - 1) // size)
        written = _Written(blocks, is_real, is_windows, n_own, start)
        return self._choose(layer, query, key, written, scale)

    def choose_prompt(
        self, layer: int, query: Tensor, key: Tensor, lengths: Tensor, *, scale: float
    ) -> list[Blocks] | None:
        """Of each tile of a prompt's queries `[R, Hq, T, D]` the blocks that it sees of `lengths`
        `[R]` entries; None: all see all. Cost: a host synchronisation.
        """
        method = self.method
        if not isinstance(method, PromptMethod) or method.is_whole or method.reads_all(layer):
            return None
        size = method.block
        width = query.shape[2]
        surplus = -width % size
        is_real = torch.arange(width, device=key.device) < lengths[:, None]  # [R, T]
        keys = key[:, :, :width].where(is_real[:, None, :, None], 0)
        queries = query.where(is_real[:, None, :, None], 0).unflatten(1, (key.shape[1], -1))
        prompt = PromptBlocks(
            layer=layer,
            queries=pad(queries, (0, 0, 0, surplus)),
            keys=pad(keys, (0, 0, 0, surplus)),
            lengths=lengths,
            size=size,
            scale=scale,
        )
        is_tiles = torch.eye(prompt.n_blocks, dtype=torch.bool, device=key.device)
        chosen = method.choose_prompt(prompt)
        shape = (*key.shape[:2], *is_tiles.shape)
        check_answer(f"{method.name}.choose_prompt", chosen, shape, "bool")
        chosen = (chosen | is_tiles) & prompt.is_before  # a tile sees the block that it is
        chosen = chosen.expand(-1, key.shape[1], -1, -1)  # [R, H, N, N]
        holds = pad(is_real, (0, surplus)).unflatten(1, (-1, size)).any(2)  # [R, N]
        seen = prompt.is_before & holds[:, :, None] & holds[:, None]
        left_out = (seen[:, None] & ~chosen).sum()
        count = chosen.sum(-1)  # [R, H, N]
        self._counter(key.device)[0].add_(left_out)
        n_left_out, *most = torch.cat([left_out[None], count.amax((0, 1))]).tolist()
        if n_left_out == 0:
            return None
        tiles = []
        for tile, n_listed in enumerate(most):
            index = chosen[:, :, tile].to(torch.uint8).topk(n_listed, -1).indices
            tiles.append(Blocks(index.int(), count[:, :, tile].int(), size))
        return tiles

    def keep(self, rows: Tensor) -> None:
        for known in (self._summaries, self._begins):
            for layer, states in known.items():
                known[layer] = states[rows.to(states.device)]
        for last in self._last.values():
            last.select(rows)

    def _chooses(self, layer: int) -> bool:
        method = self.method
        return layer >= method.first_layer and not (method.is_whole or method.chooses_prompts)

    def _choose(
        self, layer: int, query: Tensor, key: Tensor, written: _Written, scale: float
    ) -> Blocks | None:
        method = self.method
        size = method.block
        surplus = written.own.shape[1] * size - written.is_real.shape[1]
        holds = pad(written.is_real, (0, surplus)).unflatten(1, (-1, size)).any(2)[:, None]
        source = method.source(layer)
        if source == layer:
            self._chosen[layer] = self._ask(layer, query, key, written, scale, holds)
        chosen = self._chosen[source]
        if method.reads_all(layer):
            return None

        # what the window has written is read in any case
        is_empty = ~chosen.any(-1)
        chosen = chosen | (written.own[:, None] & holds)
        count = chosen.sum(-1)
        left_out = (holds & ~chosen).sum()
        self._counter(key.device).add_(torch.stack([left_out, is_empty.sum()]))
        most = method.most(chosen.shape[2], written.n_own)
        if self._reads_back:
            most, n_left_out = torch.stack([count.max(), left_out]).tolist()
            if n_left_out == 0:
                return None
        index = chosen.to(torch.uint8).topk(most, -1).indices  # those that are chosen come first
        return Blocks(index.int(), count.int(), size)

    def _is_scored(self, layer: int, start: Tensor) -> bool:
        begins = self._begins.get(layer)
        is_begun = begins is not None and len(begins) == len(start)
        return is_begun and self.method.summary is not None and not self.method.reads_all(layer)

    def _choose_by_scores(
        self, layer: int, query: Tensor, key: Tensor, start: Tensor, scale: float
    ) -> Blocks | None:
        method = self.method
        summary = method.summary
        assert summary is not None
        room = key.shape[2]
        width = query.shape[2]
        size = method.block
        n_blocks = -(-room // size)
        n_own = (width + size - 2) // size + 1
        if summary == "given":
            written = start[:, None] // size + torch.arange(n_own, device=key.device)
            is_real = torch.arange(room, device=key.device) < (start + width)[:, None]
            self._follow(layer, key, written, is_real)
        summaries = self._grow(layer, n_blocks)[..., :n_blocks].mT
        share = method.share
        scores = dispatch.run(
            block_scores, query, key, summaries, start,
            size=size, kind=summary, each=share is not None,
        )  # fmt: skip
        index, count = dispatch.run(
            choose_blocks, scores, start, self._counter(key.device)[0],
            width=width, room=room, size=size, most=method.most(n_blocks, n_own),
            budget=method.budget, p=share, scale=scale,
        )  # fmt: skip
        if self._reads_back:
            n_filled = ((start + width).clamp(max=room) + size - 1) // size
            if bool((count >= n_filled[:, None]).all()):
                return None
            index = index[..., : int(count.max())]
        return Blocks(index, count, size)

    def _ask(
        self, layer: int, query: Tensor, key: Tensor, written: _Written, scale: float, holds: Tensor
    ) -> Tensor:
        """What the method chooses, `[R, H, N]` bool, of blocks `[R, 1, N]` that hold something."""
        method = self.method
        begins = self._begins.get(layer)
        is_new = begins is None or len(begins) != len(written.start)
        if is_new:  # its rows have no prompt, or are others
            self._remember(layer, written.start)
        last = self._last[layer]
        before = replace(last)
        chosen = method.choose(
            LayerBlocks(
                layer=layer,
                queries=query.unflatten(1, (key.shape[1], -1)).flatten(2, 3),
                keys=key,
                summaries=self._follow(
                    layer, key, None if is_new else written.blocks, written.is_real
                ),
                size=method.block,
                is_real=written.is_real,
                is_own=written.own,
                start=written.start,
                begins=self._begins[layer],
                width=query.shape[2],
                n_own=written.n_own,
                scale=scale,
                is_first=self._reads_back and layer not in self._asked,
                reads_back=self._reads_back,
                last=last,
                lasts=self._last,
            )
        )
        self._asked.add(layer)
        if not self._reads_back:
            last.settle(before)
        check_answer(f"{method.name}.choose", chosen, (*key.shape[:2], holds.shape[2]), "bool")
        return (chosen & holds).expand(-1, key.shape[1], -1)

    def _counter(self, device: torch.device) -> Tensor:
        if device not in self._counters:
            self._counters[device] = torch.zeros(2, dtype=torch.int64, device=device)
        return self._counters[device]

    def _grow(self, layer: int, n_blocks: int) -> Tensor:
        """Summaries `[R, H, C, N + 1]` of a layer, with room for so many blocks."""
        known = self._summaries[layer]
        if known.shape[3] <= n_blocks:  # the cache has grown
            grown = known.new_zeros(*known.shape[:3], n_blocks + 1)
            grown[..., : known.shape[3] - 1] = known[..., :-1]
            self._summaries[layer] = known = grown
        return known

    def _remember(self, layer: int, ends: Tensor) -> None:
        """Begin a layer's memory behind prompts that end at `ends` `[R]`."""
        begins = self._begins.get(layer)
        if begins is None or len(begins) != len(ends):
            self._begins[layer] = ends.clone()
            self._last[layer] = LastChoice()
            return
        begins.copy_(ends)
        self._last[layer].forget()

    def _follow(
        self, layer: int, key: Tensor, written: Tensor | None, is_real: Tensor
    ) -> Tensor | None:
        """Summaries `[R, H, N, C]` of a layer, anew in blocks `written` `[R, n]` (None: all)."""
        method = self.method
        capacity = key.shape[2]
        size = method.block
        n_blocks = -(-capacity // size)
        known = self._summaries.get(layer)
        is_new = known is None or len(known) != len(key)
        blocks = torch.arange(n_blocks, device=key.device).expand(len(key), -1)
        blocks = blocks if is_new or written is None else written
        at = blocks[..., None] * size + torch.arange(size, device=key.device)  # [R, n, P]
        row = torch.arange(len(key), device=key.device)[:, None, None]
        index = at.clamp(max=capacity - 1)
        entries = key.transpose(1, 2)[row, index]  # [R, n, P, H, D]
        holds = is_real[row, index] & (at < capacity)
        summaries = method.summarise(entries.permute(0, 3, 1, 2, 4), holds[:, None, ..., None])
        if summaries is None:
            return None
        shape = (*key.shape[:2], blocks.shape[1], *getattr(summaries, "shape", ())[3:])
        check_answer(f"{method.name}.summarise", summaries, shape, "float")
        # stored by number and then by block: scoring them is a product with contiguous memory
        summaries = summaries.mT  # [R, H, C, n]
        if is_new:
            self._summaries[layer] = summaries.new_zeros(*summaries.shape[:3], n_blocks + 1)
        known = self._grow(layer, n_blocks)
        target = blocks.clamp(max=known.shape[3] - 1)[:, None, None].expand_as(summaries)
        known.scatter_(3, target, summaries)
        return known[..., :n_blocks].mT
