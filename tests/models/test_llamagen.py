"""LlamaGen: the published names, full passes as published, and every policy on it."""

from __future__ import annotations

import itertools
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.contracts import Pass, Prompt
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.evaluation.exactness.g_test import count_sequences, g_test
from mmaccel.pipelines.hosts.loading.checkpoint import read_weights
from mmaccel.pipelines.models.llamagen.token_model import (
    LlamaGenTextWindow,
    LlamaGenWindow,
    load_transformer,
)
from tests.fixtures.llamagen import (
    CAPTIONS,
    CLASSES,
    LENGTHS,
    build,
    conditions,
    draw_texts,
    label,
    load,
    open_llamagen,
)

LAYER = {  # c2i_B_256.pt, layer 0
    "attention.wqkv.weight": (2304, 768),
    "attention.wo.weight": (768, 768),
    "feed_forward.w1.weight": (2048, 768),
    "feed_forward.w3.weight": (2048, 768),
    "feed_forward.w2.weight": (768, 2048),
    "attention_norm.weight": (768,),
    "ffn_norm.weight": (768,),
}
KINDS = ("classes", "text")


def sample(
    window: LlamaGenWindow, prompt: Prompt, policy: Any, seed: Any = 3, **options: Any
) -> mmaccel.Generation:
    noise = mmaccel.Noise.from_seed(seed, prompt.batch)
    return policy.sample(window, prompt, 16, params=mmaccel.SamplingParams(**options), noise=noise)


def test_published_names_and_shapes_are_read() -> None:
    names = {f"layers.{k}.{name}": shape for k in range(12) for name, shape in LAYER.items()}
    names |= {
        "cls_embedding.embedding_table.weight": (1001, 768),
        "tok_embeddings.weight": (16384, 768),
        "norm.weight": (768,),
        "output.weight": (16384, 768),
    }
    assert sum(math.prod(shape) for shape in names.values()) == 110_888_448  # "111 M"
    weights = {name: torch.zeros(1).expand(shape) for name, shape in names.items()}
    model = load_transformer(weights, dtype=torch.bfloat16)
    assert sum(each.numel() for each in model.parameters()) == 110_888_448
    window = LlamaGenWindow(model, 16)
    assert (window.num_classes, window.vocab_size, window.max_positions) == (1000, 16384, 257)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 5])
def test_logits_are_those_of_the_published_network(kind: str, width: int) -> None:
    window, prompt = open_llamagen(kind, guided=True)
    model, first, seen = conditions(kind, guided=True)
    tokens = torch.randint(12, (6, 16), generator=torch.Generator().manual_seed(2))
    expected = model(first, tokens, seen)  # of all 16 slots
    window.reserve(6, first.shape[1] + 16)
    held = torch.cat([prompt.tokens, torch.zeros(6, 16, dtype=torch.int64)], 1)
    for row, length in enumerate(prompt.lengths.tolist()):
        held[row, length : length + 16] = tokens[row]
    start = prompt.lengths - 1
    window.prefill(Pass(prompt.tokens, torch.zeros_like(start), lengths=start))
    for slot in range(0, 16 - width, width):
        at = start[:, None] + slot + torch.arange(width)
        logits = window.forward(Pass(held.gather(1, at), at[:, 0]))
        torch.testing.assert_close(logits, expected[:, slot : slot + width], atol=2e-4, rtol=1e-4)


def test_padding_of_a_text_may_hold_anything() -> None:
    """A query that sees it would be NaN, and NaN spreads through zero weights."""
    window, prompt = open_llamagen("text", True)
    assert isinstance(window, LlamaGenTextWindow)
    expected = sample(window, prompt, mmaccel.Jacobi(5)).tokens
    features = draw_texts()
    features[torch.arange(6) >= LENGTHS[:, None]] = math.nan
    prompt = window.begin(features, LENGTHS, True)
    assert torch.equal(sample(window, prompt, mmaccel.Jacobi(5)).tokens, expected)


@pytest.mark.slow
def test_samples_follow_the_models_own_distribution() -> None:
    model, n_samples = build(CLASSES), 5000
    window = LlamaGenWindow(load(model), 4)
    prompt = label(window, [2] * n_samples, False)
    policy = mmaccel.SpeculativeJacobi(window=4, coupling="maximal")
    noise, params = mmaccel.Noise.from_seed(1, n_samples), mmaccel.SamplingParams()
    made = policy.sample(window, prompt, 2, params=params, noise=noise)
    sequences = torch.tensor(list(itertools.product(range(12), repeat=2)))
    first = model.cls_embedding(torch.full((144,), 2))
    seen = torch.ones(144, 1, dtype=torch.bool)
    probabilities = model(first, sequences, seen).double().softmax(-1)
    probabilities = probabilities.gather(2, sequences[..., None])[..., 0].prod(1)
    test = g_test(count_sequences(made.tokens, 12), probabilities)
    assert test.p_value > 1e-4 and test.degrees > 20, test
    assert g_test(count_sequences(made.tokens.flip(1), 12), probabilities).p_value < 1e-4


def test_a_checkpoint_is_read_and_fitted(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = build(CAPTIONS)
    saved = {"model": model.state_dict(), "steps": torch.tensor(3), "args": Namespace(lr=1.0)}
    torch.save(saved, tmp_path / "t2i.pt")
    save_file(model.state_dict(), tmp_path / "t2i.safetensors")
    named = {"model": "GPT-B", "state_dict": model.state_dict()}  # a name is no wrapper
    torch.save(named, tmp_path / "named.pt")
    for name in ("t2i.pt", "t2i.safetensors", "named.pt"):
        again = load_transformer(read_weights(tmp_path / name), n_head=4)
        assert torch.equal(again.lm_head.weight, model.output.weight)
        assert torch.equal(again.condition.unconditional, model.cls_embedding.uncond_embedding)


def test_files_that_do_not_fit_are_refused() -> None:
    state = build(CLASSES).state_dict()
    with pytest.raises(OptionError, match="n_head: expected .* width 32"):
        load_transformer(state)
    with pytest.raises(UnsupportedModelError, match='Missing key.*: "model.norm.weight"'):
        load_transformer({k: v for k, v in state.items() if k != "norm.weight"}, n_head=4)
    with pytest.raises(UnsupportedModelError, match='Unexpected key.*: "rope"'):
        load_transformer(state | {"rope": torch.zeros(1)}, n_head=4)
    with pytest.raises(UnsupportedModelError, match="expected a tensor tok_embeddings.weight"):
        load_transformer({"quant_conv.weight": torch.zeros(1)})


def test_more_positions_than_the_grid_has_are_refused() -> None:
    with pytest.raises(OptionError, match="at most 17 .*, received 18"):
        open_llamagen("classes", False)[0].reserve(3, 18)


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_are_of_one_side(kind: str) -> None:
    window, _ = open_llamagen(kind, False)
    other = type(window)(window.model, window.side + 1)
    assert window.graph_key() != other.graph_key()


def test_weights_hold_no_memory_but_their_own() -> None:
    model = open_llamagen("classes", False)[0].model
    for weight in model.parameters():
        assert weight.untyped_storage().nbytes() == weight.nbytes
