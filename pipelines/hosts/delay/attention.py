"""StepCaches: keys and values of a decoder whose layers attend to steps, and to an encoder."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.pipelines.hosts.layers.masks import make_mask
from mmaccel.pipelines.hosts.layers.store import KVCacheLayout, make_cache

_STRIDE = 64  # of the attended length on a CPU, where it is known without waiting


class StepCaches:
    """The caches of a run, as layers of transformers take them."""

    def __init__(
        self,
        n_layers: int,
        rows: int,
        n_entries: int,  # steps, and entries before them
        dtype: torch.dtype,
        *,
        padding: Tensor | None = None,  # [R, T] bool, True where no entry of the row sees an index
        reads_back: bool = True,
    ) -> None:
        self._reads_back = reads_back
        self._layout = KVCacheLayout(rows, n_entries + 1)
        self._dtype = dtype
        self._padding = None
        if padding is not None:
            n_behind = self._layout.max_length - padding.shape[1]
            self._padding = pad(padding, (0, n_behind), value=False)
        self.own: Any = make_cache(n_layers, self._layout)  # of self-attention

    @cached_property
    def both(self) -> Any:
        """An `EncoderDecoderCache`; its first pass adds the encoder's keys and values."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        return EncoderDecoderCache(self.own, DynamicCache())

    def prepare(self, at: Tensor) -> Tensor:
        """Begin a pass over entries `[R, n]` int64; their mask `[R, 1, n, visible entries]`."""
        layout = self._layout
        visible = layout.max_length
        if self._reads_back:
            visible = min(visible, -(-(int(at.max()) + 1) // _STRIDE) * _STRIDE)
        layout.prepare(at, visible)
        mask = make_mask(at, layout.visible_length, None, self._dtype)
        if self._padding is None:
            return mask
        is_hidden = self._padding[:, None, None, : mask.shape[-1]]
        # entries that are padding see each other, so that they hold no NaN
        is_own = self._padding.gather(1, at.clamp(max=layout.max_length - 1))[:, None, :, None]
        return mask.masked_fill(is_hidden & ~is_own, float("-inf"))


def mask_encoder(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask of attention to an encoder, `[R, 1, 1, T]`, of `[R, T]`; None hides nothing."""
    if mask is None:
        return None
    hidden = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return hidden.masked_fill_(~mask.bool(), torch.finfo(dtype).min)[:, None, None]
