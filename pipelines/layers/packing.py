"""Quantisation of a run's caches carried out: accepted entries are packed when they are old enough.

A query before which a row of a layer has n entries reads the first `count(n)` of them in fewer bits
(`CacheQuantizer`). A pass begins with `Packing.advance`, which reads from `start` what was accepted
and packs the groups that are due. A window that reaches across a boundary reads the group in front
of it twice: entries before the boundary whole, those behind it in fewer bits, as it will be packed.
So what an entry reads follows from its position and the accepted tokens alone, whatever was
drafted, and no draft is packed, since no window is wider than the newest entries that stay whole.

Where tensors are not read on the host, groups have their memory from the beginning, and every pass
packs one of each row, which is kept where it is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmaccel.errors import OptionError
from mmaccel.reduction.kv_cache.contract import CacheQuantizer, Codes

if TYPE_CHECKING:
    from mmaccel.pipelines.layers.store import KVCacheLayout, WindowLayer


class Workspace:
    """Memory in which the layers of a run are unpacked, one after the other.

    A layer's keys and values are read before the next layer's are unpacked.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}

    def take(self, side: int, like: Tensor, length: int) -> Tensor:
        """`[R, H, length, D]` for states like `[R, H, S, D]`, holding anything.

        Args:
            side: 0 for keys, 1 for values.
            like: rows, heads and width, dtype and device.
            length: of each head.
        """
        rows, heads, _, width = like.shape
        name = side, like.device, like.dtype
        n_numbers = rows * heads * length * width
        known = self._made.get(name)
        if known is None or known.numel() < n_numbers:
            known = self._made[name] = like.new_empty(n_numbers)
        return known[:n_numbers].view(rows, heads, length, width)


class PackedEntries:
    """The first entries of a layer's rows, in whole groups; rows may have fewer than others.

    Args:
        quantizer: packs them.
        workspace: of the run.

    Attributes:
        quantizer: see above.
        is_reserved: whether all groups that there may be have memory.
    """

    is_reserved = False

    def __init__(self, quantizer: CacheQuantizer, workspace: Workspace) -> None:
        self.quantizer = quantizer
        self._workspace = workspace
        self._sides: list[Codes] = []  # keys and values, [R, H, N, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(part.nbytes for codes in self._sides for part in codes.parts())

    def join(
        self, keys: Tensor, values: Tensor, counts: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values `[R, H, length, D]` of all cache indices, until another layer is joined.

        Args:
            keys, values: `[R, H, T, D]`, what stands behind a row's packed entries.
            counts: `[R]` int64, how many those are.
            length: cache indices that are wanted.
        """
        size = self.quantizer.group
        made = []
        for side, (states, packed) in enumerate(zip((keys, values), self._sides, strict=True)):
            n_whole = states.shape[2]
            n_groups = packed.codes.shape[2]
            n_packed = n_groups * size
            both = self._workspace.take(side, states, max(length, n_packed + n_whole))
            self.quantizer.unpack(packed, both[:, :, :n_packed].unflatten(2, (n_groups, size)))
            # what stands behind a row's entries is seen by no query; zeros, for NaN passes masks
            both[:, :, n_packed:] = 0
            at = counts.to(states.device)[:, None] + torch.arange(n_whole, device=states.device)
            both.scatter_(2, at[:, None, :, None].expand_as(states), states)
            made.append(both[:, :, :length])
        return made[0], made[1]

    def append(self, keys: Tensor, values: Tensor, counts: Tensor, due: Tensor) -> None:
        """Pack the next groups of some rows.

        Args:
            keys, values, counts: see `join`; the groups stand at the front.
            due: `[R]` int64, how many groups of each row.
        """
        first = counts // self.quantizer.group
        if self.is_reserved:
            self._put(self._pack(keys, values, 1), first, due)
            return
        n_new = int(due.max())
        new = self._pack(keys, values, n_new)
        row, number = (torch.arange(n_new, device=due.device) < due[:, None]).nonzero(as_tuple=True)
        at = first[row] + number
        n_groups = int((first + due).max())
        if not self._sides:
            self._sides = [Codes(*(part[:, :, :0] for part in codes.parts())) for codes in new]
        sides = []
        for before, packed in zip(self._sides, new, strict=True):
            parts = []
            for old, part in zip(before.parts(), packed.parts(), strict=True):
                n_missing = max(n_groups - old.shape[2], 0)
                room = part.new_zeros(*part.shape[:2], n_missing, *part.shape[3:])
                grown = torch.cat([old, room], 2)
                grown[row, :, at] = part[row, :, number]
                parts.append(grown)
            sides.append(Codes(*parts))
        self._sides = sides

    def reserve(self, n_groups: int) -> None:
        """Let there be memory for so many groups, which stays; after the first `append`."""
        sides = []
        for packed in self._sides:
            parts = []
            for part in packed.parts():
                room = part.new_zeros(*part.shape[:2], n_groups, *part.shape[3:])
                room[:, :, : part.shape[2]] = part
                parts.append(room)
            sides.append(Codes(*parts))
        self._sides = sides
        self.is_reserved = True

    def _put(self, new: Sequence[Codes], number: Tensor, due: Tensor) -> None:
        """Store a group of each row that is due, `[R]`, by its number, `[R]`."""
        row = torch.arange(len(due), device=due.device)
        for held, packed in zip(self._sides, new, strict=True):
            for store, part in zip(held.parts(), packed.parts(), strict=True):
                number = number.clamp(max=store.shape[2] - 1)
                is_due = (due > 0).view(-1, *[1] * (part.ndim - 2))
                store[row, :, number] = torch.where(is_due, part[:, :, 0], store[row, :, number])

    def extend(
        self, mask: Tensor, key: Tensor, value: Tensor, held: tuple[Tensor, Tensor],
        counts: Tensor, is_behind: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """A mask `[R, 1, W, S]`, keys and values `[R, H, S, D]` with the next group at their ends,
        as it will be read once it is packed.

        Args:
            held, counts: see `join`; the group stands at the front.
            is_behind: `[R, W]` bool, entries that read it so.
        """
        size = self.quantizer.group
        unpacked = []
        for states, packed in zip(held, self._pack(*held, 1), strict=True):
            group = torch.empty_like(states[:, :, None, :size])
            self.quantizer.unpack(packed, group)
            unpacked.append(group[:, :, 0])
        entry = torch.arange(key.shape[2], device=mask.device)
        packed_until = counts.to(mask.device)[:, None]
        is_next = (entry >= packed_until) & (entry < packed_until + size)  # [R, S]
        is_behind = is_behind.to(mask.device)[:, None, :, None]
        seen = mask.masked_fill(is_next[:, None, None] & is_behind, float("-inf"))
        added = torch.zeros_like(mask[..., :1]).masked_fill(~is_behind, float("-inf"))
        return (
            torch.cat([seen, added.expand(-1, -1, -1, size)], 3),
            torch.cat([key, unpacked[0]], 2),
            torch.cat([value, unpacked[1]], 2),
        )

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these, `[n]` int64, in their order."""
        self._sides = [
            Codes(*(part[rows.to(part.device)] for part in codes.parts())) for codes in self._sides
        ]

    def _pack(self, keys: Tensor, values: Tensor, n_groups: int) -> tuple[Codes, Codes]:
        """The first groups of `[R, H, T, D]` in fewer bits."""
        size = self.quantizer.group
        groups = [
            states[:, :, : n_groups * size].unflatten(2, (n_groups, size))
            for states in (keys, values)
        ]
        return self.quantizer.pack_keys(groups[0]), self.quantizer.pack_values(groups[1])


class Packing:
    """The packed entries of one run, whose prompt is in the cache.

    Args:
        quantizer: packs.
        layers: of the cache, maybe after eviction, and all that share their layouts.
        lengths: `[R]` int64, positions of the prompt.
        reads_back: whether passes may read tensors on the host.
    """

    def __init__(
        self,
        quantizer: CacheQuantizer,
        layers: Sequence[WindowLayer],
        lengths: Tensor,
        reads_back: bool = True,
    ) -> None:
        self._reads_back = reads_back
        self._quantizer = quantizer
        self._layers = layers
        # a group that is not due, a window, one index of scratch and one that nothing uses
        room = quantizer.residual + quantizer.group + quantizer.widest + 2
        workspace = Workspace()
        for layer in layers:
            layer.packed = PackedEntries(quantizer, workspace)
        self._layouts = list({id(layer.layout): layer.layout for layer in layers}.values())
        for layout in self._layouts:
            layout.pack(torch.zeros_like(lengths), room)
            self._pack(layout, quantizer.count(layout.to_index(lengths)) // quantizer.group)
        if not reads_back:
            for layer in layers:
                assert layer.packed is not None
                layer.packed.reserve(-(-layer.layout.max_length // quantizer.group))

    @property
    def has_packed(self) -> bool:
        """Whether a row holds something in fewer bits. Cost: a host synchronisation."""
        found = (layout.packed for layout in self._layouts)
        return any(packed is not None and bool(packed.any()) for packed in found)

    def advance(self, indices: Tensor) -> None:
        """Pack what has become due, before a pass.

        Args:
            indices: `[R, W]` int64, cache indices of the pass where nothing was evicted; those
                before a row's first are accepted.

        Raises:
            OptionError: a pass that is wider than the quantiser allows.

        Cost: a host synchronisation on a CPU; elsewhere a group of every layer is packed.
        """
        quantizer = self._quantizer
        width = indices.shape[1]
        if width > quantizer.widest:
            raise OptionError(
                f"{quantizer.name}: expected a group and a residual of at least the {width} "
                f"entries of a pass, received {quantizer!r}; give larger ones or a narrower window"
            )
        entry = torch.arange(width, device=indices.device)
        for layout in self._layouts:
            assert layout.packed is not None
            start = layout.to_index(indices[:, 0]).clamp(max=layout.max_length - 1)
            due = (quantizer.count(start) > layout.packed).long()
            n_packed = layout.packed + due * quantizer.group
            reads_next = quantizer.count(start[:, None] + entry) > n_packed[:, None]  # [R, W]
            # a single entry reads what is packed before it
            is_due, is_crossed = True, width > 1
            if self._reads_back:
                is_due, is_crossed = torch.stack([due.any(), reads_next.any()]).tolist()
            if is_due:
                self._pack(layout, due)
            layout.reads_next = reads_next if is_crossed else None

    def _pack(self, layout: KVCacheLayout, due: Tensor) -> None:
        """Pack the next groups `[R]` of the layers that share a layout."""
        assert layout.packed is not None
        for layer in self._layers:
            if layer.layout is layout:
                layer.pack(due)
        layout.packed += due * self._quantizer.group
