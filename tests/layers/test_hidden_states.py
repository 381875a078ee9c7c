"""What methods of caches are given of the hidden states which the attention of a layer reads.

`test_kvzap_scorer.py` compares the tokens of one that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.contracts import Pass
from mmaccel.pipelines.hosts.causal_lm.compatibility import find_facts
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.layers.attention_function import watched
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from mmaccel.pipelines.hosts.layers.observing import Observer
from mmaccel.pipelines.hosts.layers.store import number_served
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod
from tests.fixtures.fused_lms import RECOGNISED, build_decoder
from tests.fixtures.tiny_lms import build_lm
from tests.layers import test_denoisers as denoisers
from tests.layers.test_eviction import draw_rows


@dataclass(frozen=True)
class ByHidden(CacheMethod):
    """The entries whose hidden states have the highest first numbers."""

    @property
    def reads_hidden(self) -> bool:
        return True

    def rate(self, index: int, hidden: Tensor) -> Tensor:
        return hidden[:, None, :, index].float()

    def score(self, layer: CachedLayer) -> Tensor:
        assert layer.rated is not None
        return layer.rated


METHOD = ByHidden(budget=9)


class Reading:
    """A `Watcher` that keeps hidden states `[R, T, C]` by layer."""

    reads_hidden = True

    def __init__(self) -> None:
        self.layers: dict[int, Tensor] = {}

    def keep(self, layer: int, query: Tensor, key: Tensor, **given: Any) -> None:
        self.layers[layer] = given["hidden"]


@dataclass(frozen=True)
class Noting(ByHidden):
    """Keeps what it is given, in a list that the test made."""

    seen: Any = None

    def rate(self, index: int, hidden: Tensor) -> Tensor:
        self.seen[index] = hidden
        return hidden.new_zeros(len(hidden), 1, hidden.shape[1])

    def score(self, layer: CachedLayer) -> Tensor:
        return torch.zeros(len(layer.keys), 1, layer.keys.shape[2])


# models whose layers all slide carry no methods; sdpa, which a watched pass runs, caps nothing
NOT_FULL = ("mistral, sliding", "ministral", "capped", "eager", "_vl", "glm4v", "glm_ocr")
FULL = [name for name in RECOGNISED if not any(word in name for word in NOT_FULL)]


@pytest.mark.parametrize("name", FULL)
def test_the_fused_decoder_reads_what_the_model_does(name: str) -> None:
    """In every class of layers that it serves, also those with norms elsewhere."""
    model = build_decoder(name)
    ids = torch.tensor(draw_rows(11))
    own = Reading()
    served = number_served(find_facts(model).windows)
    with torch.no_grad(), watched(model, [own], served=served):
        model(ids)
    for fused in (True, False):
        seen: dict[int, Tensor] = {}
        window = CausalLMWindow(model, fused=fused)
        window.use_methods(LayerMethods(kv_cache=Noting(budget=2, seen=seen)))
        window.reserve(1, 20)
        window.prefill(Pass(ids, torch.zeros(1, dtype=torch.int64)))
        assert window.route.name.startswith("fused" if fused else "model")
        assert sorted(seen) == sorted(own.layers) == list(range(len(served)))
        assert served
        for layer, hidden in own.layers.items():
            torch.testing.assert_close(seen[layer][:, :11], hidden, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_finished_blocks_of_a_canvas_are_read() -> None:
    """Of ragged prompts, whose last block is not finished."""
    target, rows = denoisers.build(), denoisers.draw(33, 9, 22)
    seen: dict[int, Tensor] = {}
    method = Noting(budget=8, seen=seen)
    denoisers.generate(target, denoisers.POLICIES["stepwise"], rows, kv_cache=method)
    for row, ids in enumerate(rows):
        n = len(ids) // denoisers.BLOCK * denoisers.BLOCK
        block = torch.arange(n) // denoisers.BLOCK
        mask = torch.where(block[:, None] >= block, 0.0, float("-inf")).double()
        given: dict[str, Any] = {"attention_mask": mask[None, None], "output_hidden_states": True}
        found = target.model(torch.tensor([ids[:n]]), **given).hidden_states
        for layer, states in zip(target.model.get_decoder().layers, found):
            expected = layer.input_layernorm(states)[0]
            received = seen[layer.self_attn.layer_idx][row, :n]
            torch.testing.assert_close(received, expected)


def test_a_method_that_reads_none_leaves_no_hooks() -> None:
    model = build_lm("llama")
    module = model.get_decoder().layers[0].self_attn
    with watched(model, [Observer(mmaccel.SnapKV(budget=9, window=3), torch.tensor([5]))]):
        assert not module._forward_pre_hooks
    with watched(model, [Reading()]):
        assert module._forward_pre_hooks
    assert not module._forward_pre_hooks
