"""Heads that hold different numbers of entries: who shares memory, bytes, pairs, bugs.

`test_eviction.py` compares their tokens with a mask over the full cache, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.contracts import Pass
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.layers.eviction import Eviction
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from mmaccel.pipelines.hosts.layers.observing import Observer
from mmaccel.pipelines.hosts.layers.store import KVCacheLayout, WindowLayer
from mmaccel.reduction.kv_cache.contract import CachedLayer
from mmaccel.reduction.kv_cache.headwise import ThresholdMethod
from tests.fixtures.tiny_lms import build_lm
from tests.layers import test_eviction
from tests.layers.test_eviction import (
    check_speculation,
    draw_rows,
    fill,
)

PLAIN = mmaccel.Autoregressive()


@dataclass(frozen=True)
class _Above(ThresholdMethod):
    """The entries whose first number is at least the threshold."""

    budget: int = 1

    def score(self, layer: CachedLayer) -> Tensor:
        """Of every head."""
        return layer.keys[..., 0].float()


def evict_above(keys: Tensor, lengths: Tensor) -> tuple[WindowLayer, Eviction]:
    """A layer with keys `[R, H, S, D]` of which those from 0 on stay, and what was done."""
    layer = fill(KVCacheLayout(len(keys), 40), keys)
    method = _Above()
    observer = Observer(method, lengths)
    observer.keep(0, keys, keys, mask=None, scale=1.0)
    eviction = Eviction(method, [layer])
    eviction.evict(lengths, observer)
    return layer, eviction


def draw_heads(*n_kept: int) -> Tensor:
    """Keys `[1, H, 20, 3]` of heads that keep so many of the first entries, and the last one."""
    keys = torch.randn(1, len(n_kept), 20, 3, generator=torch.Generator().manual_seed(0))
    for head, n in enumerate(n_kept):
        keys[0, head, :, 0] = -1
        keys[0, head, : n - 1, 0] = 1
    return keys


def test_heads_of_about_equal_lengths_share_memory() -> None:
    """In eighths of the longest, 16: 16 and 15, 4 and 3; each part has room for 20 more."""
    layer, made = evict_above(draw_heads(4, 16, 3, 15), torch.tensor([20]))
    assert [part.heads.tolist() for part in layer.parts] == [[1, 3], [0, 2]]
    assert layer.count(torch.tensor([20])).tolist() == [[4, 16, 3, 15]]
    lengths = [part.held()[0].shape[2] for part in layer.parts]
    room = 20 + 1  # of the layout of 40, and one that nothing uses
    assert lengths == [16 + room, 4 + room]
    assert layer.keys is None and layer.values is None
    n_numbers = 2 * 2 * 3 * (16 + room) + 2 * 2 * 3 * (4 + room)
    assert layer.n_bytes == 4 * n_numbers
    assert made.n_evicted == (11, 20)  # 38 of 80 stay


def test_a_layer_that_drops_nothing_stays_whole() -> None:
    layer, made = evict_above(draw_heads(20, 20), torch.tensor([20]))
    assert layer.parts == () and layer.keys is not None and made.n_evicted[0] == 0


SPLITTING = (
    mmaccel.KVzap(budget=4, threshold=-2.9, window=4),
    mmaccel.DuoAttention(budget=8, sinks=2, share=0.87, window=4),
    mmaccel.KVzip(budget=8, sinks=1, piece=9),
)


@pytest.mark.parametrize(("method", "fused"), [*zip(SPLITTING, (True, False, True))], ids=repr)
def test_bytes_are_what_is_allocated(method: Any, fused: bool) -> None:
    """The memory of the full cache is gone, and passes allocate none."""
    model, rows = build_lm("llama"), draw_rows(64, 64)
    window = CausalLMWindow(model, fused=fused)
    window.use_methods(LayerMethods(kv_cache=method))
    window.reserve(2, 64 + 14)
    window.prefill(Pass(torch.tensor(rows)[:, :-1], torch.zeros(2, dtype=torch.int64)))
    split = [layer for layer in window.run_caches().layers if layer.parts]
    sizes = [layer.n_bytes for layer in split]
    assert split
    for layer, size in zip(split, sizes):
        exact = 0
        for part in layer.parts:
            held = int(part.layout.to_index(torch.tensor([63, 63])).max())
            room = held + 14 + 1 + 1 + 1  # as in test_eviction.py
            exact += 2 * 4 * 2 * 8 * len(part.heads) * room  # float32, two rows, 8 channels
        assert size == exact
    window.forward(Pass(torch.tensor(rows)[:, -1:], torch.tensor([63, 63])))
    assert [layer.n_bytes for layer in split] == sizes


def _heads_come_back_as_parts(patch: pytest.MonkeyPatch) -> None:
    def join(self: WindowLayer, made: list[Tensor]) -> Tensor:
        parts = zip(self.parts, made, strict=True)
        return torch.cat([one.unflatten(0, (-1, part.layout.heads)) for part, one in parts], 1)

    patch.setattr(WindowLayer, "join_heads", join)


def _all_rows_write_where_the_longest_does(patch: pytest.MonkeyPatch) -> None:
    own = KVCacheLayout.shorten
    patch.setattr(
        KVCacheLayout, "shorten",
        lambda self, dropped, *given: own(self, dropped.amin().expand_as(dropped) - 1, *given),
    )  # fmt: skip


def _all_heads_hold_as_much(patch: pytest.MonkeyPatch) -> None:
    own = WindowLayer.count
    patch.setattr(
        WindowLayer, "count",
        lambda self, ends: own(self, ends).amax(1, keepdim=True).expand_as(own(self, ends)),
    )  # fmt: skip


def check_once(reference: str) -> None:
    test_eviction.check_masked("qwen2", reference)


def check_rounds(reference: str) -> None:
    test_eviction.check_rounds(PLAIN, reference)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (_heads_come_back_as_parts, check_once),  # joined in the order of parts
        (_all_rows_write_where_the_longest_does, check_once),
        (_all_heads_hold_as_much, check_rounds),  # as the longest
    ],
)
def test_planted_bugs_are_seen(plant: Any, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for reference in ("kvzap", "kvzap, a higher threshold"):
            check(reference)
            check_speculation(reference, 1)
