"""Entries of a layer that are held in fewer bits, in front of those that its store holds whole."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.reduction.kv_cache.contract import CacheQuantizer, Codes


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
        keys, values: `[R, H, n, D]` of the longest row, n a multiple of its group.
        workspace: of the run.

    Attributes:
        quantizer: see above.
    """

    def __init__(
        self, quantizer: CacheQuantizer, keys: Tensor, values: Tensor, workspace: Workspace
    ) -> None:
        self.quantizer = quantizer
        self._workspace = workspace
        self._keys = quantizer.pack_keys(self._by_group(keys))
        self._values = quantizer.pack_values(self._by_group(values))

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        both = (*self._keys.parts(), *self._values.parts())
        return sum(part.nbytes for part in both)

    def join(
        self, keys: Tensor, values: Tensor, counts: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values `[R, H, length, D]` of all cache indices, until another layer is joined.

        Args:
            keys, values: `[R, H, T, D]`, what stands behind a row's packed entries.
            counts: `[R]` int64, how many those are.
            length: cache indices that are wanted.
        """
        return (
            self._join(0, self._keys, keys, counts, length),
            self._join(1, self._values, values, counts, length),
        )

    def append(self, keys: Tensor, values: Tensor, counts: Tensor, due: Tensor) -> None:
        """Pack the next group of some rows.

        Args:
            keys, values, counts: see `join`; the group stands at the front.
            due: `[R]` bool, the rows.
        """
        size = self.quantizer.group
        new_keys = self.quantizer.pack_keys(keys[:, :, None, :size])
        new_values = self.quantizer.pack_values(values[:, :, None, :size])
        number = (counts // size).to(keys.device)
        self._keys = _put(self._keys, new_keys, number, due)
        self._values = _put(self._values, new_values, number, due)

    def preview(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The next group `[R, H, P, D]` as it will be read once it is packed; see `append`."""
        size = self.quantizer.group
        sides = ((keys, self.quantizer.pack_keys), (values, self.quantizer.pack_values))
        made = []
        for states, pack in sides:
            group = states[:, :, None, :size]
            rounded = torch.empty_like(group)
            self.quantizer.unpack(pack(group), rounded)
            made.append(rounded[:, :, 0])
        return made[0], made[1]

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these, `[n]` int64, in their order."""
        index = rows.to(self._keys.codes.device)
        self._keys = Codes(*(part[index] for part in self._keys.parts()))
        self._values = Codes(*(part[index] for part in self._values.parts()))

    def _by_group(self, states: Tensor) -> Tensor:
        rows, heads, length, width = states.shape
        size = self.quantizer.group
        return states.reshape(rows, heads, length // size, size, width)

    def _join(
        self, side: int, packed: Codes, states: Tensor, counts: Tensor, length: int
    ) -> Tensor:
        n_whole = states.shape[2]
        n_groups = packed.codes.shape[2]
        n_packed = n_groups * self.quantizer.group
        made = self._workspace.take(side, states, max(length, n_packed + n_whole))
        by_group = made[:, :, :n_packed].unflatten(2, (n_groups, self.quantizer.group))
        self.quantizer.unpack(packed, by_group)
        # what stands behind a row's entries is seen by no query; zeros, for NaN passes masks
        made[:, :, n_packed:] = 0
        at = counts.to(states.device)[:, None] + torch.arange(n_whole, device=states.device)
        made.scatter_(2, at[:, None, :, None].expand_as(states), states)
        return made[:, :, :length]


def _put(packed: Codes, new: Codes, number: Tensor, due: Tensor) -> Codes:
    """`packed` with `new` `[R, H, 1, ...]` as the group `number` `[R]` of the rows that are due."""
    n_groups = max(packed.codes.shape[2], int(number.where(due, 0).max()) + 1)
    made = []
    for old, part in zip(packed.parts(), new.parts(), strict=True):
        rows, heads, n_known = old.shape[:3]
        grown = old
        if n_groups > n_known:
            room = old.new_zeros(rows, heads, n_groups - n_known, *old.shape[3:])
            grown = torch.cat([old, room], 2)
        row = due.nonzero()[:, 0]
        grown[row, :, number[row]] = part[row, :, 0]
        made.append(grown)
    return Codes(*made)
