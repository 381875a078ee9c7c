"""StepCaches: keys and values of a decoder whose layers attend to steps and to an encoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.layers.store import KVCacheLayout, make_cache, make_mask

_STRIDE = 64  # of the attended length on a CPU, where it is known without waiting


class StepCaches:
    """The caches of a run, as the layers of an encoder-decoder of transformers take them.

    Args:
        n_layers: of the decoder.
        rows: R.
        n_steps: S.
        dtype: of the model.

    Attributes:
        cache: an `EncoderDecoderCache`; its first pass adds the encoder's keys and values.
    """

    def __init__(self, n_layers: int, rows: int, n_steps: int, dtype: torch.dtype) -> None:
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        self._layout = KVCacheLayout(rows, n_steps + 1)
        self._dtype = dtype
        self.cache: Any = EncoderDecoderCache(make_cache(n_layers, self._layout), DynamicCache())

    def prepare(self, at: Tensor) -> Tensor:
        """Begin a pass over steps `[R, n]` int64; their mask `[R, 1, n, visible steps]`."""
        layout = self._layout
        visible = layout.max_length
        if at.device.type == "cpu":
            visible = min(visible, -(-(int(at.max()) + 1) // _STRIDE) * _STRIDE)
        layout.prepare(at, visible)
        return make_mask(at, layout.visible_length, None, self._dtype)


def mask_encoder(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask of attention to an encoder, `[R, 1, 1, T]`, of `[R, T]`; None hides nothing.

    A row that hides everything, as the unconditional one does, sees everything alike: no NaN.
    """
    if mask is None:
        return None
    hidden = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return hidden.masked_fill_(~mask.bool(), torch.finfo(dtype).min)[:, None, None]
