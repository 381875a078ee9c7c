"""DuoAttention: heads that look far back keep everything, the others their ends.

G. Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming
Heads", ICLR 2025 (arXiv:2410.10819), section 2. A few heads, the retrieval heads, look up anything
in a text; the others, the streaming heads, attend to its first entries and the most recent ones,
and need no more.

Departures: the paper finds the retrieval heads of a model once, by training a gate for each head on
made-up texts. Here a short calibration does, on each prompt: a key head is a retrieval head if the
queries of the last `window` entries give more than `share` of their attention, in the mean, to what
a streaming head would drop. So no file belongs to a model, and a head may be one in one row and not
in another. Entries go once, when the prompt is processed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.checks import check_int, check_number
from mmaccel.errors import OptionError
from mmaccel.reduction.kv_cache.contract import CachedLayer
from mmaccel.reduction.kv_cache.headwise import HeadwiseMethod


@dataclass(frozen=True)
class DuoAttention(HeadwiseMethod):
    """Keeps all entries of heads that look far back, and of the others the first and the last.

    Args:
        budget: entries that a streaming head keeps.
        sinks: how many of them are the first ones, fewer than the budget.
        share: of their attention, from which on a head is a retrieval head.
        window: how many of the last queries are looked at.

    Raises:
        OptionError: a value out of range, as many sinks as the budget, or rounds.
    """

    budget: int = 384
    sinks: int = 128
    share: float = 0.1
    window: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(f"{self.name}.sinks", self.sinks, 0, hint="128 suits most models")
        check_number(f"{self.name}.share", self.share, 0, 1, "0.1 suits most models")
        check_int(f"{self.name}.window", self.window, 1, hint="64 suits most models")
        if self.sinks >= self.budget:
            raise OptionError(
                f"{self.name}.sinks: expected fewer than the budget of {self.budget}, received "
                f"{self.sinks}; give a larger budget or fewer sinks"
            )

    @property
    def observed(self) -> int:
        """The window."""
        return self.window

    @property
    def n_recent(self) -> int:
        """See `CacheMethod`."""
        return self.budget - self.sinks

    def score(self, layer: CachedLayer) -> Tensor:
        """The attention of the window, `[R, H, S]`; that of a head is 1 in all."""
        mass = layer.mass().where(layer.is_entry(), 0)
        return mass / mass.sum(-1, keepdim=True).clamp(min=1e-6)

    def keeps(self, layer: CachedLayer, scores: Tensor) -> Tensor:
        """See `HeadwiseMethod`."""
        index = torch.arange(scores.shape[2], device=scores.device)
        is_end = (index < self.sinks) | (index >= layer.lengths[:, None, None] - self.n_recent)
        far = scores.masked_fill(is_end, 0).sum(-1, keepdim=True)
        return is_end | (far > self.share)
