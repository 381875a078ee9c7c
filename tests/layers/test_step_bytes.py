"""What a step reads, against arithmetic by hand; where weights dominate, a run says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.contracts import Pass
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from mmaccel.results import StepBytes
from tests.fixtures.tiny_lms import build_lm

HIDDEN, INNER, LAYERS, HEADS, KEY_HEADS, WIDTH, VOCAB = 32, 48, 3, 4, 2, 8, 40
METHODS = [
    LayerMethods(),
    LayerMethods(kv_cache=mmaccel.SnapKV(budget=9, window=4)),
    LayerMethods(kv_cache=mmaccel.KVzip(budget=9, piece=8)),  # heads of different lengths
    LayerMethods(attention=mmaccel.Quest(budget=0.5, block=4)),
    LayerMethods(kv_cache=mmaccel.QuantizedCache(group=4, residual=4)),
]


def build(**changes: Any) -> Any:
    """A Llama of the sizes above."""
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
    }
    return build_lm("llama", **(sizes | changes))


def count_weights(key_heads: int = KEY_HEADS, vocab_size: int = VOCAB) -> int:
    """Of the layers of `build`, its last norm and its head, in float32."""
    attention = 2 * HIDDEN * HEADS * WIDTH + 2 * HIDDEN * key_heads * WIDTH
    layer = attention + 3 * HIDDEN * INNER + 2 * HIDDEN
    return 4 * (LAYERS * layer + HIDDEN + vocab_size * HIDDEN)


@pytest.mark.parametrize(("key_heads", "methods"), [*zip((1, 2, 4, 2, 1), METHODS)], ids=repr)
def test_bytes_are_those_of_arithmetic(key_heads: int, methods: LayerMethods) -> None:
    window = CausalLMWindow(build(num_key_value_heads=key_heads))
    window.use_methods(methods)
    assert window.layer_counts.step_bytes is None
    window.reserve(2, 30)
    lengths = torch.tensor([20, 17])
    prompt = torch.arange(40).view(2, 20) % VOCAB
    window.prefill(Pass(prompt, torch.zeros_like(lengths), lengths=lengths))
    window.forward(Pass(prompt[:, :1], lengths))
    found = window.layer_counts.step_bytes
    assert found is not None and found.weights == count_weights(key_heads)
    an_entry = 2 * LAYERS * key_heads * WIDTH * 4
    # two cache indices of each row are scratch; those of a repetition (KVzip) are freed
    assert found.cache == 2 * (30 + 2) * an_entry


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_of_fewer_ids_reads_their_rows(is_tied: bool) -> None:
    window = CausalLMWindow(build(tie_word_embeddings=is_tied), vocab_size=10)
    window.reserve(1, 8)
    window.forward(Pass(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)))
    found = window.layer_counts.step_bytes
    assert found is not None and found.weights == count_weights(vocab_size=10)


def test_without_the_cache_a_step_reads_the_weights() -> None:
    assert StepBytes(weights=100, cache=50).speed_up == 1.5


@pytest.mark.parametrize(
    ("n_positions", "methods"),
    [
        (40, {"kv_cache": mmaccel.SnapKV(budget=9, window=4)}),
        (400, {"kv_cache": mmaccel.SnapKV(budget=9, window=4)}),
        (40, {"attention": mmaccel.Quest(budget=0.5, block=4)}),
        (40, {"attention": mmaccel.XAttention(block=4, stride=2)}),  # steps read as much as before
        (40, {}),
    ],
    ids=repr,
)
def test_a_run_says_that_weights_dominate(n_positions: int, methods: dict[str, Any]) -> None:
    model = build()
    prompt = torch.arange(n_positions - 8)[None] % (VOCAB - 3) + 3
    with mmaccel.attach(model, "autoregressive", **methods) as run:
        model.generate(prompt, do_sample=False, max_new_tokens=8, eos_token_id=None)
    notes = [note for note in run.stats.notes if "weights dominate" in note]
    n_cache = (n_positions + 2) * 2 * LAYERS * KEY_HEADS * WIDTH * 4
    is_told = n_cache < count_weights() and "XAttention" not in str(methods) and bool(methods)
    assert len(notes) == is_told
    if is_told:
        assert f"at most {1 + n_cache / count_weights():.2f} times" in notes[0]
