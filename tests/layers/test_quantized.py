"""Quantised caches: transformers' own model over the cache of accepted tokens, rounded in loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import mmaccel
from mmaccel.contracts import Pass
from mmaccel.kernels.packed_attention import packed_attention
from mmaccel.pipelines.hosts.causal_lm import model as causal_model
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.layers import attention
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from mmaccel.pipelines.hosts.layers.packing import PackedEntries, Packing
from mmaccel.pipelines.hosts.layers.store import KVCacheLayout, WindowLayer
from mmaccel.reduction.kv_cache.contract import CacheQuantizer
from tests.fixtures.lanes import every
from tests.fixtures.tiny_lms import build_lm
from tests.layers.masked_model import greedy_rows, list_full
from tests.layers.test_eviction import (
    LENGTHS,
    Hiding,
    check_feed,
    draw_rows,
    feed,
    generate,
    plan_snapkv,
    plan_tova,
)
from tests.matrix.cells import pairwise

N_NEW = 40
ROUTES = (True, False)
REFERENCES: dict[str, tuple[Any, Any]] = {  # method, the plan of what evicts before
    "4 bits": (mmaccel.QuantizedCache(group=8, residual=6), None),
    "8 bits": (mmaccel.QuantizedCache(group=6, residual=9, bits=8), None),
    "a narrow group": (mmaccel.QuantizedCache(group=6, residual=17), None),
    "over SnapKV": (
        mmaccel.QuantizedCache(
            group=6, residual=6, over=mmaccel.SnapKV(budget=15, window=4, kernel=3)
        ),
        plan_snapkv,
    ),
    "over TOVA": (
        mmaccel.QuantizedCache(group=6, residual=7, bits=8, over=mmaccel.TOVA(budget=9)),
        plan_tova,
    ),
}


def round_numbers(numbers: Tensor, bits: int) -> Tensor:
    """Numbers `[n]` that share a scale, one after the other."""
    least = numbers.min()
    step = (numbers.max() - least) / (2**bits - 1)
    if step == 0:
        return numbers.clone()
    return torch.stack([least + torch.round((x - least) / step) * step for x in numbers])


@dataclass
class Rounding:
    """Rounds what `masked` layers have cached of one row, as its entries become old."""

    method: mmaccel.QuantizedCache
    hides: Hiding | None
    n_prompt: int
    n_rounded: dict[tuple[int, int], int] = field(default_factory=dict)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads, length = key.shape[1:3]
        hidden = torch.zeros(1, heads, 1, length, dtype=torch.bool)
        if self.hides is not None:
            hidden = self.hides(layer, query, key, value)
        if query.shape[2] > 1:  # the prompt
            return hidden
        for head in range(heads):
            held = list(range(length - 1))
            if self.hides is not None:
                kept = self.hides.plans[layer][head]
                held = kept + list(range(self.n_prompt, length - 1))
            done = self.n_rounded.get((layer, head), 0)
            size = self.method.group
            while done + size + self.method.residual <= len(held):
                entries = held[done : done + size]
                for channel in range(key.shape[3]):
                    own = key[0, head, entries, channel]
                    key[0, head, entries, channel] = round_numbers(own, self.method.bits)
                for entry in entries:
                    value[0, head, entry] = round_numbers(value[0, head, entry], self.method.bits)
                done += size
            self.n_rounded[layer, head] = done
        return hidden


@cache
def rounded(name: str, model_name: str) -> list[list[int]]:
    """Tokens of three rows by the model's own layers over what loops round."""
    model = build_lm(model_name)
    method, plan = REFERENCES[name]

    def round_old(ids: list[int]) -> Rounding:
        n_prompt = len(ids) - (plan is None)  # the last token goes with the first window then
        hides = None
        if plan is not None:
            hides = Hiding(method.over, plan, len(list_full(model)), n_prompt)
        return Rounding(method, hides, n_prompt)

    return greedy_rows(model, draw_rows(*LENGTHS), round_old, N_NEW, whole=plan is not None)


def check_reference(name: str, policy: Any, fused: Any, model_name: str = "qwen2") -> None:
    model, rows = build_lm(model_name), draw_rows(*LENGTHS)
    method, _ = REFERENCES[name]
    given: dict[str, Any] = {"fused": fused, "max_new_tokens": N_NEW}
    received, stats = generate(model, policy, rows, kv_cache=method, **given)
    whole, _ = generate(model, mmaccel.Autoregressive(), rows, kv_cache=method.over, **given)
    if method.bits == 4:  # otherwise nothing is proven; 8 bits change few tokens
        assert not torch.equal(received, whole)
    assert received.tolist() == rounded(name, model_name)
    assert stats.exactness == "relaxed" and repr(method) in stats.reference


CELLS = pairwise(
    {
        "model_name": ["qwen2", "gemma3, deep"],
        "policy": [mmaccel.Autoregressive(), mmaccel.Jacobi(window=6)],
        "fused": ROUTES,
        "name": list(REFERENCES),
    }
)


@pytest.mark.parametrize(
    ("model_name", "policy", "fused", "name"), every(4, [tuple(cell.values()) for cell in CELLS])
)
def test_it_is_the_model_over_the_rounded_cache(
    model_name: str, policy: Any, fused: bool, name: str
) -> None:
    check_reference(name, policy, fused, model_name)


@pytest.mark.parametrize(("branches", "name"), [(1, "a narrow group"), (2, "over SnapKV")])
def test_speculate_reject_and_go_on(branches: int, name: str) -> None:
    method, _ = REFERENCES[name]
    check_feed(method, branches, method.over)


@dataclass(frozen=True)
class Own(mmaccel.QuantizedCache):
    """May pack otherwise, so that kernels do not."""


@pytest.mark.parametrize("name", every(2, ["8 bits", "over TOVA", "a child"]))
def test_layers_that_attend_by_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their specifications, on a CPU: the logits of layers that are unpacked for a pass."""
    method = Own(group=8, residual=6) if name == "a child" else REFERENCES[name][0]
    expected = feed(method, 1, 1)
    called = []

    def spy(*given: Any, **options: Any) -> Any:
        called.append(given)
        return packed_attention(*given, **options)

    monkeypatch.setattr(causal_model, "find_reason", lambda window: "")
    monkeypatch.setattr(attention, "packed_attention", spy)
    for most in (1, 6):
        assert torch.allclose(feed(method, 1, most), expected, atol=1e-3)
    assert bool(called) == (name != "a child")


@pytest.mark.slow  # a prompt of 3800 tokens
@pytest.mark.parametrize(("bits", "most"), [(4, 0.3), (8, 0.45)])
def test_bytes_at_4096_positions(bits: Any, most: float) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=5000,
    )  # fmt: skip
    torch.manual_seed(0)
    window = CausalLMWindow(LlamaForCausalLM(config).eval())
    window.use_methods(LayerMethods(kv_cache=mmaccel.QuantizedCache(bits=bits)))
    window.reserve(1, 4096)
    lengths = torch.tensor([3800])
    window.prefill(Pass(torch.randint(64, (1, 3800)), torch.zeros_like(lengths), lengths=lengths))
    whole = 2 * 2 * 4 * 128 * 4096  # layers, keys and values, bytes of a float32, numbers
    held = []
    for first in range(3800, 4096, 37):  # the answer is packed, too
        width = min(37, 4096 - first)
        window.forward(Pass(torch.randint(64, (1, width)), torch.tensor([first])))
        held.append(window.layer_counts.packed_bytes[0])
    assert held[-1] <= most * whole
    assert sum(layer.n_bytes for layer in window.run_caches().layers) == held[-1]
    assert held[-1] - held[0] <= most * whole * 300 / 4096
    assert window.layer_counts.packed_bytes[1] >= whole


def fill(states: Tensor, group: int, lengths: Tensor) -> tuple[WindowLayer, Packing]:
    """A layer that holds `[R, H, S, D]` as keys and values, quantised."""
    layout = KVCacheLayout(len(states), states.shape[2] + 8)
    layer = WindowLayer(layout)
    layout.prepare(torch.arange(states.shape[2]).expand(len(states), -1), layout.max_length)
    layer.update(states, states)
    method = mmaccel.QuantizedCache(group=group, residual=group, bits=8)
    return layer, Packing(method, [layer], lengths)


def test_rows_that_leave_take_their_entries_with_them() -> None:
    states = torch.randn(3, 2, 30, 4, generator=torch.Generator().manual_seed(1))
    layer, packing = fill(states, 4, torch.tensor([30, 11, 22]))
    rows = torch.tensor([2, 0])
    layer.keep(rows)
    layer.layout.keep(rows)
    indices = torch.tensor([[22, 23], [30, 31]])
    packing.advance(indices)
    layer.layout.prepare(indices, 40)
    for seen in layer.unpack(*layer.update(states[rows, :, :2], states[rows, :, :2])):
        for row, length in enumerate((22, 30)):
            expected = states[rows[row], :, :length]
            assert torch.allclose(seen[row, :, :length], expected, atol=0.03)
            assert torch.equal(seen[row, :, length - 4 : length], expected[:, -4:])
            assert not torch.equal(seen[row, :, :4], expected[:, :4])


def test_numbers_that_are_all_alike_are_exact() -> None:
    states = torch.full((1, 1, 30, 4), 0.1)
    layer, _ = fill(states, 4, torch.tensor([30]))
    layer.layout.prepare(torch.tensor([[30]]), 38)
    keys, _ = layer.unpack(*layer.visible())
    assert torch.equal(keys[:, :, :30], states)


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the scale of keys is forgotten": lambda patch: patch.setattr(
        mmaccel.QuantizedCache, "unpack",
        lambda self, packed, out, own=mmaccel.QuantizedCache.unpack: own(
            self,
            packed if packed.scale.shape[4] == 1
            else replace(packed, scale=torch.ones_like(packed.scale)),
            out,
        ),
    ),
    "drafts are packed": lambda patch: patch.setattr(
        Packing, "advance",
        lambda self, indices, own=Packing.advance: own(
            self, indices + (indices[:, -1:] - indices[:, :1])
        ),
    ),
    "one entry fewer stays whole": lambda patch: patch.setattr(
        CacheQuantizer, "count",
        lambda self, lengths, own=CacheQuantizer.count: own(self, lengths + 1),
    ),
    "a window across a boundary reads what is whole": lambda patch: patch.setattr(
        PackedEntries, "extend", lambda self, mask, key, value, *rest: (mask, key, value)
    ),
    "values by channel": lambda patch: (
        patch.setattr(mmaccel.QuantizedCache, "code_bits", None),
        patch.setattr(
            mmaccel.QuantizedCache, "pack_values", mmaccel.QuantizedCache.pack_keys
        ),
    ),
    "halves of a byte are mixed up": lambda patch: patch.setattr(
        mmaccel.QuantizedCache, "unpack",
        lambda self, packed, out, own=mmaccel.QuantizedCache.unpack: own(
            self, replace(packed, codes=packed.codes << 4 | packed.codes >> 4), out
        ),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    with pytest.raises(AssertionError):
        check_reference("4 bits", mmaccel.Autoregressive(), "auto")
        test_speculate_reject_and_go_on(1, "4 bits")
