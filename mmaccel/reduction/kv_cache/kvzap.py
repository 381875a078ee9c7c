"""KVzap: in each head, the entries whose scores are above a threshold.

S. Jegou, M. Jeblick, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning", 2026
(arXiv:2601.07891), with the rule of A. Lancucki et al., "Inference-Time Hyper-Scaling with KV Cache
Compression", 2025 (arXiv:2506.05345): entries whose score is below a threshold go, except for the
last ones. A score is the logarithm of the attention that an entry will receive times the size of
what it then adds. How much stays follows from the text, for each row, layer and head.

Departures: the paper's score is predicted from hidden states by a trained network, one for each
model. Here it needs no training: it is measured on the queries of the last `window` entries, the
most that one of them gives to an entry, times the length of its value in proportion to the row's
mean. Published thresholds are therefore not those of this score. Entries go once, when the prompt
is processed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.checks import check_int
from mmaccel.reduction.kv_cache.contract import CachedLayer
from mmaccel.reduction.kv_cache.headwise import ThresholdMethod

_TINY = 1e-30


@dataclass(frozen=True)
class KVzap(ThresholdMethod):
    """Keeps what a query like the last ones may need, as much as that is, head by head.

    Args:
        budget: the last entries, which stay in every head; the window among them.
        threshold: the least score of an entry that stays, a natural logarithm: -7 is a thousandth
            of a query's attention to a value of mean length.
        window: how many of the last queries are looked at.

    Raises:
        OptionError: a value out of range, or rounds.
    """

    threshold: float = -7.0
    window: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(f"{self.name}.window", self.window, 1, hint="64 suits most models")

    @property
    def observed(self) -> int:
        """The window."""
        return self.window

    def score(self, layer: CachedLayer) -> Tensor:
        """Logarithms `[R, H, S]`."""
        heads = layer.keys.shape[1]
        received = layer.weights().unflatten(1, (heads, -1)).amax((2, 3))
        length = layer.values.float().norm(dim=-1).where(layer.is_entry(), 0)
        mean = length.sum(-1, keepdim=True) / layer.lengths[:, None, None]
        return (received * length / mean.clamp(min=_TINY)).clamp(min=_TINY).log()
