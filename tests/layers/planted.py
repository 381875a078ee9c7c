"""Bugs of eviction that every kind of model must show, each planted for one test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mmaccel.pipelines.hosts.layers.eviction import Eviction
from mmaccel.pipelines.hosts.layers.store import KVCacheLayout
from mmaccel.reduction.kv_cache.contract import CacheMethod

Plant = Callable[[pytest.MonkeyPatch], None]


def _one_index_too_many(patch: pytest.MonkeyPatch) -> None:
    own = KVCacheLayout.to_index
    patch.setattr(
        KVCacheLayout, "to_index", lambda self, at: own(self, at) + (self.dropped is not None)
    )


def _heads_are_mixed_up(patch: pytest.MonkeyPatch) -> None:
    own = CacheMethod.select
    patch.setattr(CacheMethod, "select", lambda self, *given: own(self, *given).flip(1))


def _recent_entries_go(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheMethod, "n_recent", property(lambda self: 0))


def _branches_plan_alone(patch: pytest.MonkeyPatch) -> None:
    own = Eviction.__init__
    patch.setattr(Eviction, "__init__", lambda self, method, layers, *_: own(self, method, layers))


def _reads_are_not_moved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCacheLayout, "shift", lambda self, reads: reads[..., : self.visible_length])


EVICTION: dict[str, Plant] = {
    "one index too many": _one_index_too_many,
    "heads are mixed up": _heads_are_mixed_up,
    "recent entries go": _recent_entries_go,
    "branches plan alone": _branches_plan_alone,
    "reads are not moved": _reads_are_not_moved,
}
