"""Methods under which heads keep different numbers of entries."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from mmaccel.checks import MANY, check_answer, within
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod, list_entries


@dataclass(frozen=True)
class HeadwiseMethod(CacheMethod):
    """Base of methods under which each head of each row keeps as many entries as it needs.

    Heads that keep about equally many share memory. In rounds a head is a row of one head to the
    method: R is then rows times heads, and H is 1.

    Args:
        budget: heads of no more entries keep all. What else it is is the method's.
    """

    @property
    def is_headwise(self) -> bool:
        return True

    @abstractmethod
    def keeps(self, layer: CachedLayer, scores: Tensor) -> Tensor:
        """`[R, H, S]` bool, the entries that stay beside the last `n_recent`, by `score`."""

    def plan(self, layer: CachedLayer, scores: Tensor) -> Tensor:
        """The entries that stay, `[R, H, K]` int64, ascending, then -1. Synchronises."""
        is_short = (layer.lengths <= self.budget)[:, None, None]
        keeps = self.keeps(layer, scores)
        check_answer(f"{self.name}.keeps", keeps, scores.shape, "bool")
        is_kept = (keeps | ~layer.before(self.n_recent) | is_short) & layer.is_entry()
        return list_entries(is_kept, int(is_kept.sum(-1).max()))


@dataclass(frozen=True)
class ThresholdMethod(HeadwiseMethod):
    """Base of methods that keep the entries whose scores reach a threshold.

    Args:
        budget: the last entries, which stay in every head whatever their scores.
        threshold: the least score of an entry that stays.
    """

    budget: int = 128
    threshold: float = within(0.0, -MANY, hint="the higher it is, the less stays")

    @property
    def n_recent(self) -> int:
        return self.budget

    def keeps(self, layer: CachedLayer, scores: Tensor) -> Tensor:
        return scores >= self.threshold
