"""Layers that cache fewer columns of the prompt than those before them.

Tokens after the prompt have the same positions in every layer, and other cache indices where
columns were dropped: smaller by as many as a row lost. So these layers have a cache, and masks, of
their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.causal_lm.kv_cache import KVCacheLayout, make_masks


@dataclass(frozen=True)
class ShortLayers:
    """Consecutive layers behind one cut.

    Attributes:
        first: number of the first of them.
        layers: the decoder's modules.
        layout: of their caches.
        dropped: `[R]` int64, columns that each row lost.
    """

    first: int
    layers: list[Any]
    layout: KVCacheLayout
    dropped: Tensor

    @contextmanager
    def masked(self, positions: Tensor, dtype: torch.dtype) -> Iterator[None]:
        """Inside the block, a pass over cache indices `positions` `[R, W]` of the layers before."""
        own, layout = positions - self.dropped[:, None], self.layout
        layout.prepare(own, layout.max_length)
        mask = make_masks(own, layout.rows, layout.visible_length, [None], dtype)

        def hook(layer: Any, args: Any, given: dict[str, Any]) -> Any:
            return args, {**given, "attention_mask": mask}

        hooks = [m.register_forward_pre_hook(hook, with_kwargs=True) for m in self.layers]
        try:
            yield
        finally:
            for registered in hooks:
                registered.remove()
