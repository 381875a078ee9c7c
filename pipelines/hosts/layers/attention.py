"""The seam inside a model's layers: what one attention function knows of a pass.

A `WindowPass` attends to keys at the cache indices of each layer's own store, by `mmaccel.kernels`,
or by torch under one mask for all layers that share a cache.

A `Watcher` is called with the queries and keys of each layer before it attends, and with the hidden
states where it asks for these, in passes of ours and of the model's own (`watched`). No layer gives
out its attention map or leaves its fast kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from mmaccel.kernels import dispatch
from mmaccel.kernels.grouped_attention import grouped_attention
from mmaccel.kernels.packed_attention import packed_attention
from mmaccel.kernels.window_attention import window_attention
from mmaccel.pipelines.hosts.layers.attention_inputs import AttentionInputs
from mmaccel.pipelines.hosts.layers.gathered_attention import gathered_attention
from mmaccel.pipelines.hosts.layers.masks import make_mask, mask_reads
from mmaccel.pipelines.hosts.layers.prompt_tiles import attend_by_tiles
from mmaccel.pipelines.hosts.layers.shared_prefix import SharedPrefix, attend_with_lse
from mmaccel.pipelines.hosts.layers.sparse import BlockChooser, SparseBlocks
from mmaccel.pipelines.hosts.layers.store import KVCacheLayout, WindowLayer, number_served

Choices: TypeAlias = list[tuple[int, dispatch.Choice]]
TILE = 256  # queries of a prompt under a sliding window or a mask that attend together


class Watcher(Protocol):
    """Looks at layers while they attend, and changes nothing."""

    @property
    def reads_hidden(self) -> bool: ...

    def keep(
        self, layer: int, query: Tensor, key: Tensor, *,
        mask: Tensor | None, scale: float, hidden: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Called in front of the attention of every layer that methods serve.

        Args:
            layer: its number among those (`number_served`).
            query, key: `[R, Hq, T, D]`, `[R, Hkv, S, D]`.
            mask: `[R, 1, T, S]` of bools, or of numbers that are added; None where the last T of S
                columns see those before them, and in a `WindowPass`.
            hidden: `[R, T, C]`, what the layer's attention reads, after the norm before it; None
                unless `reads_hidden`.
        """
        ...


@dataclass
class WindowPass:
    """What the layers need to know about a pass."""

    start: Tensor  # [R] int64, cache index of each row's first query where nothing was evicted
    windows: Sequence[int | None]  # positions that each layer sees; None: all
    stores: Sequence[WindowLayer]  # of every layer, prepared for the pass
    by_kernel: bool = False  # whether `window_attention` is dispatched; else torch attends
    ragged: bool = False  # as of `window_attention`
    num_splits: int | None = None
    choices: Choices | None = None  # collects (layer, version of the kernel) of every call
    sparse: BlockChooser | None = None  # chooses the blocks that a layer attends to; None: all
    watcher: Watcher | None = None
    tree: Tensor | None = None  # [R, W, W] bool, what an entry sees of the pass; None: all before
    prompt: Tensor | None = None  # [R] int64, lengths of whole prompts from cache index 0 on
    # [R, 1 or W, P] bool, the cache indices that an entry sees, where nothing was evicted; None:
    # those up to itself
    reads: Tensor | None = None
    # whether every row begins at cache index 0: torch attends without a mask, in half of the
    # products, and under a sliding window in a few
    opens: bool = False
    prefix: SharedPrefix | None = None  # what rows read together before what their stores hold
    inputs: AttentionInputs = field(default_factory=AttentionInputs)
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    @cached_property
    def served(self) -> dict[int, int]:
        return number_served(self.windows)

    @cached_property
    def positions(self) -> Tensor:
        """Positions `[R, W]` int64 of its entries where nothing was evicted."""
        indices = self.stores[0].layout.indices
        assert indices is not None
        return self.start[:, None] + torch.arange(indices.shape[1], device=self.start.device)

    @property
    def same_bits(self) -> bool:
        """Whether an entry has the same bits beside any others: all before it are in one split."""
        changes = (self.sparse, self.tree, self.reads, self.prefix)
        is_plain = all(change is None for change in changes)
        is_one_split = self.by_kernel and self.num_splits == 1
        return is_plain and is_one_split and dispatch.uses_triton(self.start.device.type)

    @property
    def reads_hidden(self) -> bool:
        return self.watcher is not None and self.watcher.reads_hidden

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *,
        scale: float, softcap: float | None = None, hidden: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention `[R, Hq, W, D]` of a layer over its store, of which key and value
        `[R, Hkv, S, D]` are views. `hidden` `[R, W, C]` is None unless the pass `reads_hidden`.
        """
        store = self.stores[layer]
        number = self.served.get(layer)  # as methods count
        if self.watcher is not None and number is not None:
            self.watcher.keep(number, query, key, mask=None, scale=scale, hidden=hidden)
        window = self.windows[layer] if self.reads is None else None
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "window": window}
        if store.parts:
            return self._attend_to_parts(store, query, **options)
        start = store.layout.to_index(self.start).to(query.device)
        if self.tree is not None:
            options["tree"] = self.tree.to(query.device)
        if number is not None:
            if isinstance(self.sparse, SparseBlocks) and self.prompt is not None:
                lengths = self.prompt.to(key.device)
                tiles = self.sparse.choose_prompt(number, query, key, lengths, scale=scale)
                if tiles is not None:
                    return attend_by_tiles(
                        tiles, query, key, value, by_kernel=self.by_kernel, **options
                    )
            elif self.sparse is not None:
                options |= self._choose(store, number, query, key, start, scale=scale)
        if self.choices is not None and self.reads is None:
            choice = dispatch.decide(window_attention, query, key, value, start, **options)
            self.choices.append((layer, choice))
        return self._attend_to_store(store, query, key, value, start, number, **options)

    def _attend_to_store(
        self, store: WindowLayer, query: Tensor, key: Tensor, value: Tensor, start: Tensor,
        number: int | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """As `attend`; a layer with a number attends to what rows read together, too."""
        prefix = None if number is None else self.prefix
        scale = options["scale"]
        softcap = options["softcap"]
        if store.packed is not None:
            counts = store.layout.packed
            assert counts is not None
            packed = store.packed.for_kernels(counts)
            if self.by_kernel and packed is not None:
                reads_next = store.layout.reads_next
                reads_next = None if reads_next is None else reads_next.to(query.device)
                return dispatch.run(
                    packed_attention, query, key, value, start, packed, reads_next,
                    scale=scale, softcap=softcap, num_splits=self.num_splits,
                )[0]  # fmt: skip
            key, value = store.unpack(key, value)
        if self.opens and softcap is None:
            width = query.shape[2]
            key = key[:, :, :width]
            value = value[:, :, :width]
            if options["window"] is None or width <= options["window"]:
                return grouped_attention(query, key, value, None, scale=scale, is_causal=True)
            return _attend_in_tiles(query, key, value, window=options["window"], scale=scale)
        # the kernel's window counts entries of a tree, and not their depths
        is_deep = options["window"] is not None and self.tree is not None
        if self.by_kernel and not is_deep and not store.is_changing and self.reads is None:
            # heads differ in how many blocks they have
            ragged = self.ragged or options.get("blocks") is not None
            out, lse = dispatch.run(
                window_attention, query, key, value, start,
                ragged=ragged, num_splits=self.num_splits, **options,
            )  # fmt: skip
        elif options.get("blocks") is not None and not store.is_changing:
            return gathered_attention(query, key, value, start, **options)
        else:
            mask = self._find_mask(store.layout, options["window"], query)
            if store.is_changing:
                mask, key, value = store.change(mask, key, value, self.positions)
            if prefix is None:
                return attend_under(mask, query, key, value, scale=scale, softcap=softcap)
            out, lse = attend_with_lse(query, key, value, mask, scale=scale, softcap=softcap)
        if prefix is None or number is None:
            return out
        return prefix.add(
            number, query, out, lse, scale=scale, softcap=softcap, by_kernel=self.by_kernel
        )

    def _attend_to_parts(self, store: WindowLayer, query: Tensor, **options: Any) -> Tensor:
        heads = sum(part.layout.heads for part in store.parts)
        by_head = query.unflatten(1, (heads, -1))  # [R, H, G, W, D]
        outputs = []
        for part in store.parts:
            queries = part.take_heads(by_head)[:, 0]  # [R n, G, W, D]
            start = part.layout.to_index(self.start).to(query.device)
            if self.tree is not None:
                options["tree"] = part.layout.repeat(self.tree).to(query.device)
            outputs.append(self._attend_to_store(part, queries, *part.visible(), start, **options))
        return store.join_heads(outputs).flatten(1, 2)

    def _choose(
        self, store: WindowLayer, number: int, query: Tensor, key: Tensor, start: Tensor, *,
        scale: float,
    ) -> dict[str, Any]:  # fmt: skip
        """The blocks that a layer attends to, and what entries read, for `gathered_attention`."""
        sparse = self.sparse
        assert sparse is not None
        if self.reads is None or not isinstance(sparse, SparseBlocks):
            return {"blocks": sparse.choose(number, query, key, start, scale=scale)}
        layout = store.layout
        assert layout.indices is not None
        reads = layout.shift(self.reads).to(key.device)
        indices = layout.indices.to(key.device)
        # entries of the last cache index are padding, which asks for no blocks
        last = layout.to_index(torch.full_like(self.start[:, None], self.reads.shape[-1] - 1))
        entry = torch.arange(query.shape[2], device=key.device)
        entry = torch.where(indices == last.to(key.device), 0, entry)
        query = query.gather(2, entry[:, None, :, None].expand_as(query))
        blocks = sparse.choose(number, query, key, start, scale=scale, indices=indices, reads=reads)
        return {"blocks": blocks, "reads": reads}

    def _find_mask(self, layout: KVCacheLayout, window: int | None, query: Tensor) -> Tensor:
        """The mask `[R, 1, W, S]` of a layer; layers that share a cache share it."""
        name = id(layout), window
        if name not in self._masks:
            assert layout.indices is not None
            if self.reads is not None:
                reads = layout.shift(self.reads)
                mask = mask_reads(reads, layout.indices, "additive", query.dtype)
            else:
                span = None if self.tree is not None else window
                mask = make_mask(layout.indices, layout.visible_length, span, query.dtype)
            if self.tree is not None:
                mask = _hide_branches(mask, layout.indices, layout.repeat(self.tree), window)
            self._masks[name] = mask
        return self._masks[name].to(query.device)


def find_ancestors(parents: Tensor) -> Tensor:
    """`[R, W, W]` bool, which entries each of a tree follows, itself among them, of parents
    `[R, W]` int64: smaller than its own number, -1 for a root.
    """
    width = parents.shape[1]
    entry = torch.arange(width, device=parents.device)
    follows = (parents[..., None] == entry) | (entry[:, None] == entry)  # parents and itself
    reach = 1
    while reach < width:  # the ancestors of ancestors
        follows = (follows.float() @ follows.float()) > 0
        reach *= 2
    return follows


def _hide_branches(
    mask: Tensor, indices: Tensor, tree: Tensor, window: int | None = None
) -> Tensor:
    """A mask `[R, 1, W, S]` in which entries at `indices` `[R, W]` see only those that they follow
    in `tree` `[R, W, W]`, `window` positions at most, those of one depth once.
    """
    width = tree.shape[1]
    length = mask.shape[-1]
    entry = torch.arange(length, device=mask.device) - indices[:, :1]  # [R, S]
    is_inside = (entry >= 0) & (entry < width)
    index = entry.clamp(0, width - 1)[:, None].expand(-1, width, -1)
    tree = tree.to(mask.device)
    is_hidden = is_inside[:, None] & ~tree.gather(2, index)
    if window is not None:
        depth = tree.sum(-1) - 1  # [R, W]
        at = torch.where(is_inside, depth.gather(1, index[:, 0]), entry)  # [R, S], from the root on
        is_hidden |= at[:, None] <= depth[..., None] - window
    return mask.masked_fill(is_hidden[:, None], float("-inf"))


def attend_under(
    mask: Tensor, query: Tensor, key: Tensor, value: Tensor, *,
    scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Attention `[R, Hq, W, D]` under a mask of numbers `[R, 1 or Hkv, W, S]`, by torch."""
    if softcap is None:
        return grouped_attention(query, key, value, mask, scale=scale)
    return attend_with_lse(query, key, value, mask, scale=scale, softcap=softcap)[0]


def _attend_in_tiles(
    query: Tensor, key: Tensor, value: Tensor, *, window: int, scale: float
) -> Tensor:
    """Attention `[R, Hq, W, D]` to entries up to oneself, `window` at most, by tiles of queries."""
    width = query.shape[2]
    outputs = []
    for first in range(0, width, TILE):
        end = min(first + TILE, width)
        begin = max(first - window + 1, 0)  # of the keys that the tile's first query sees
        row = torch.arange(first, end, device=query.device)[:, None]
        column = torch.arange(begin, end, device=query.device)
        seen = (column <= row) & (column > row - window)
        tile = query[:, :, first:end]
        keys = key[:, :, begin:end]
        values = value[:, :, begin:end]
        outputs.append(grouped_attention(tile, keys, values, seen[None, None], scale=scale))
    return torch.cat(outputs, 2)
