"""Quantisation of a run's caches carried out: accepted entries are packed when they are old enough.

A query before which a row of a layer has n entries reads the first `count(n)` in fewer bits
(`CacheQuantizer`). A window across a boundary reads the group in front of it twice, whole and in
fewer bits, so that what an entry reads follows from its position and the accepted tokens alone. No
draft is packed: no window is wider than the newest entries that stay whole.

Groups have their memory from the beginning, and whole entries stand in a ring. `Packing.advance`
packs the next group of rows that this pass or the next may read it of; it counts once it is due.
Where tensors are not read on the host, every pass packs the next group of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmaccel.errors import OptionError
from mmaccel.kernels import dispatch
from mmaccel.kernels.pack_group import Codes, Packed, pack_group, put_group, take_group
from mmaccel.reduction.kv_cache.contract import CacheQuantizer

if TYPE_CHECKING:
    from mmaccel.pipelines.hosts.layers.store import KVCacheLayout, WindowLayer


class Workspace:
    """Memory in which layers are unpacked, each until its keys and values are read."""

    def __init__(self) -> None:
        self._memory: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}

    def take(self, number: int, like: Tensor, length: int) -> Tensor:
        """`[R, H, length, D]` for keys (0) or values (1) like `[R, H, S, D]`, holding anything."""
        rows, heads, _, width = like.shape
        name = number, like.device, like.dtype
        n_numbers = rows * heads * length * width
        memory = self._memory.get(name)
        if memory is None or memory.numel() < n_numbers:
            memory = self._memory[name] = like.new_empty(n_numbers)
        return memory[:n_numbers].view(rows, heads, length, width)


class PackedEntries:
    """The first entries of a layer's rows, in whole groups; rows may have fewer than others.

    Args:
        keys, values: `[R, H, S, D]`, all entries of each row.
        n_groups: the most that a row packs now, of the `most` that there is memory for.
    """

    def __init__(
        self, quantizer: CacheQuantizer, workspace: Workspace, keys: Tensor, values: Tensor,
        n_groups: int, most: int,
    ) -> None:  # fmt: skip
        self.quantizer = quantizer
        self._workspace = workspace
        size = quantizer.group
        groups = [
            states[:, :, : n_groups * size].unflatten(2, (n_groups, size))
            for states in (keys, values)
        ]
        packed = quantizer.pack_keys(groups[0]), quantizer.pack_values(groups[1])
        self._codes = [_reserve(codes, most) for codes in packed]  # keys, values: [R, H, N, ...]

    @property
    def n_bytes(self) -> int:
        return sum(numbers.nbytes for codes in self._codes for numbers in codes.parts())

    def for_kernels(self, counts: Tensor) -> Packed | None:
        """What kernels read, of which `counts` `[R]` entries count; None where none can."""
        quantizer = self.quantizer
        if quantizer.code_bits is None:
            return None
        keys, values = self._codes
        counts = counts.to(keys.codes.device)
        return Packed(keys, values, counts, quantizer.group, quantizer.code_bits)

    def pack_next(self, keys: Tensor, values: Tensor, counts: Tensor) -> None:
        """Pack the group behind `counts` `[R]`, of rings `[R, H, room, D]`: n at `n % room`."""
        packed = self.for_kernels(counts)
        if packed is not None:
            dispatch.run(pack_group, keys, values, packed)
            return
        counts = counts.to(keys.device)
        quantizer = self.quantizer
        methods = quantizer.pack_keys, quantizer.pack_values
        for states, codes, pack in zip((keys, values), self._codes, methods, strict=True):
            group = take_group(states, counts, quantizer.group)
            put_group(codes, pack(group), counts // quantizer.group)

    def join(
        self, keys: Tensor, values: Tensor, counts: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values `[R, H, length, D]` of all cache indices, until a layer is joined."""
        size = self.quantizer.group
        joined = []
        for number, states in enumerate((keys, values)):
            codes = self._codes[number].parts()
            packed = Codes(*(numbers[:, :, : -(-length // size)] for numbers in codes))
            room = states.shape[2]
            n_groups = packed.codes.shape[2]
            n_packed = n_groups * size
            whole = self._workspace.take(number, states, max(length, n_packed + room))
            self.quantizer.unpack(packed, whole[:, :, :n_packed].unflatten(2, (n_groups, size)))
            # what stands behind a row's entries is seen by no query; zeros, for NaN passes masks
            whole[:, :, n_packed:] = 0
            # the ring has entry n at n % room, of the `room` entries from a row's first one on
            first = counts.to(states.device)[:, None]
            at = first + (torch.arange(room, device=states.device) - first) % room
            whole.scatter_(2, at[:, None, :, None].expand_as(states), states)
            joined.append(whole[:, :, :length])
        return joined[0], joined[1]

    def extend(
        self, mask: Tensor, key: Tensor, value: Tensor, counts: Tensor, is_behind: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mask `[R, 1, W, S]`, keys, values, and the next group, for those `is_behind` `[R, W]`."""
        size = self.quantizer.group
        counts = counts.to(mask.device)
        row = torch.arange(len(counts), device=mask.device)
        unpacked = []
        for states, codes in zip((key, value), self._codes, strict=True):
            next_group = (numbers[row, :, counts // size][:, :, None] for numbers in codes.parts())
            group = states.new_empty(*states.shape[:2], 1, size, states.shape[3])
            self.quantizer.unpack(Codes(*next_group), group)
            unpacked.append(group[:, :, 0])
        entry = torch.arange(key.shape[2], device=mask.device)
        packed_until = counts[:, None]
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
        self._codes = [
            Codes(*(numbers[rows.to(numbers.device)] for numbers in codes.parts()))
            for codes in self._codes
        ]


def _reserve(codes: Codes, most: int) -> Codes:
    reserved = []
    for numbers in codes.parts():
        room = numbers.new_zeros(*numbers.shape[:2], most, *numbers.shape[3:])
        room[:, :, : numbers.shape[2]] = numbers
        reserved.append(room)
    return Codes(*reserved)


class Packing:
    """The packed entries of a run with prompts of `lengths` `[R]`; layers share layouts."""

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
        workspace = Workspace()
        self._layouts = list({id(layer.layout): layer.layout for layer in layers}.values())
        size = quantizer.group
        for layout in self._layouts:
            counts = quantizer.count(layout.to_index(lengths))
            n_groups = int(counts.max()) // size
            # a group that is not due, and a window
            layout.pack(counts, quantizer.residual + size + quantizer.widest)
            for layer in self._served(layout):
                keys, values = layer.held()
                layer.packed = PackedEntries(
                    quantizer, workspace, keys, values, n_groups, -(-layout.max_length // size)
                )
                layer.hold_ring(keys, values)

    @property
    def has_packed(self) -> bool:
        """Whether a row holds something in fewer bits. Cost: a host synchronisation."""
        counts = (layout.packed for layout in self._layouts)
        return any(packed is not None and bool(packed.any()) for packed in counts)

    def advance(self, indices: Tensor) -> None:
        """Count what is due, and pack what will be, before a pass at `indices` `[R, W]` int64;
        raises OptionError where it is too wide. Cost: a host synchronisation on a CPU; elsewhere a
        group of every layer is packed.
        """
        quantizer = self._quantizer
        width = indices.shape[1]
        if width > quantizer.widest:
            raise OptionError(
                f"{quantizer.name}: expected a group and a residual of at least the {width} "
                f"entries of a pass, received {quantizer!r}; give larger ones or a narrower window"
            )
        entry = torch.arange(width + 1, device=indices.device)
        for layout in self._layouts:
            assert layout.packed is not None
            start = layout.to_index(indices[:, 0]).clamp(max=layout.max_length - 1)
            torch.maximum(layout.packed, quantizer.count(start), out=layout.packed)
            # entries of this pass and the first one after it that are behind the next boundary
            is_behind = quantizer.count(start[:, None] + entry) > layout.packed[:, None]
            reads_next = is_behind[:, :-1].contiguous()
            # a single entry reads what is packed before it
            is_near, is_crossed = True, width > 1
            if self._reads_back:
                is_near, is_crossed = torch.stack([is_behind.any(), reads_next.any()]).tolist()
            layout.reads_next = reads_next if is_crossed else None
            if is_near:
                for layer in self._served(layout):
                    assert layer.packed is not None
                    layer.packed.pack_next(*layer.held(), layout.packed)

    def _served(self, layout: KVCacheLayout) -> list[WindowLayer]:
        return [layer for layer in self._layers if layer.layout is layout]
