"""Quantisation of a run's caches carried out: accepted entries are packed when they are old enough.

A query before which a row of a layer has n entries reads the first `count(n)` of them in fewer bits
(`CacheQuantizer`). A pass begins with `Packing.advance`, which reads from `start` what was accepted
and packs the groups that are due. A window that reaches across a boundary reads the group in front
of it twice: entries before the boundary whole, those behind it in fewer bits, as it will be packed.
So what an entry reads follows from its position and the accepted tokens alone, whatever was
drafted, and no draft is packed, since no window is wider than the newest entries that stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.errors import OptionError
from mmaccel.pipelines.layers.packed_entries import Workspace
from mmaccel.pipelines.layers.store import KVCacheLayout, WindowLayer
from mmaccel.reduction.kv_cache.contract import CacheQuantizer


@dataclass(frozen=True)
class NextGroup:
    """What a window across a boundary reads beside its store.

    Attributes:
        keys, values: `[R, H, P, D]`, the group in front of the boundary, in fewer bits.
        is_next: `[R, S]` bool, where the store holds it whole.
        is_behind: `[R, W]` bool, entries that read it in fewer bits.
    """

    keys: Tensor
    values: Tensor
    is_next: Tensor
    is_behind: Tensor

    def extend(self, mask: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A mask `[R, 1, W, S]`, keys and values `[R, H, S, D]` with the group at their ends."""
        is_behind = self.is_behind[:, None, :, None]
        seen = mask.masked_fill(self.is_next[:, None, None] & is_behind, float("-inf"))
        added = torch.zeros_like(mask[..., :1]).masked_fill(~is_behind, float("-inf"))
        added = added.expand(-1, -1, -1, self.keys.shape[2])
        return (
            torch.cat([seen, added], 3),
            torch.cat([key, self.keys], 2),
            torch.cat([value, self.values], 2),
        )


class Packing:
    """The packed entries of one run, whose prompt is in the cache.

    Args:
        quantizer: packs.
        layers: of the cache, maybe after eviction; they get other layouts.
        lengths: `[R]` int64, positions of the prompt.
    """

    def __init__(
        self, quantizer: CacheQuantizer, layers: Sequence[WindowLayer], lengths: Tensor
    ) -> None:
        self._quantizer = quantizer
        self._layers = layers
        self._crossed: set[int] = set()  # layouts in which the pass reaches across a boundary
        # a group that is not due, a window, one index of scratch and one that nothing uses
        room = quantizer.residual + quantizer.group + quantizer.widest + 2
        workspace = Workspace()
        layouts: dict[int, KVCacheLayout] = {}
        for layer in layers:
            old = layer.layout
            if id(old) not in layouts:
                layouts[id(old)] = old.pack(quantizer.count(old.to_index(lengths)), room)
            layer.pack(quantizer, layouts[id(old)], workspace)
        self._layouts = list(layouts.values())

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

        Cost: a host synchronisation.
        """
        quantizer = self._quantizer
        width = indices.shape[1]
        if width > quantizer.widest:
            raise OptionError(
                f"{quantizer.name}: expected a group and a residual of at least the {width} "
                f"entries of a pass, received {quantizer!r}; give larger ones or a narrower window"
            )
        self._crossed = set()
        for layout in self._layouts:
            assert layout.packed is not None
            start = layout.to_index(indices[:, 0]).clamp(max=layout.max_length - 1)
            due = quantizer.count(start) > layout.packed
            will_be_due = quantizer.count(start + width - 1) > layout.packed + due * quantizer.group
            is_any_due, is_any_crossed = torch.stack([due.any(), will_be_due.any()]).tolist()
            if is_any_due:
                for layer in self._layers:
                    if layer.layout is layout:
                        layer.pack_next(due)
                layout.packed += due * quantizer.group
            if is_any_crossed:
                self._crossed.add(id(layout))

    def find_next(self, layer: int, start: Tensor, width: int, length: int) -> NextGroup | None:
        """What a window across a boundary reads of a layer; None where none is crossed.

        Args:
            layer: its number.
            start: `[R]` int64, cache index of each row's first query in this layer.
            width: W.
            length: S, cache indices that the pass reads.
        """
        store = self._layers[layer]
        layout = store.layout
        if id(layout) not in self._crossed:
            return None
        assert store.packed is not None and layout.packed is not None
        keys, values = store.packed.preview(*store.held())
        packed = layout.packed.to(start.device)[:, None]  # [R, 1]
        at = start[:, None] + torch.arange(width, device=start.device)
        entry = torch.arange(length, device=start.device)
        is_next = (entry >= packed) & (entry < packed + self._quantizer.group)
        return NextGroup(keys, values, is_next, self._quantizer.count(at) > packed)
