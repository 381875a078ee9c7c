"""Models under window attention decode the tokens they decode under their own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import CausalLMWindow, Jacobi, Noise, SamplingParams
from mmaccel.contracts import Pass, Prompt
from mmaccel.pipelines.hosts.causal_lm import model as window_model
from mmaccel.pipelines.hosts.causal_lm.image_vocabulary import ImageTokenWindow
from mmaccel.pipelines.hosts.layers import attention as attention_module
from mmaccel.pipelines.models.glm_image import GlmImageWindow
from mmaccel.pipelines.models.janus import JanusCodes
from mmaccel.samplers.prompt_chunks import prefill_together
from tests.fixtures.graph_replay import Replay, list_operations
from tests.fixtures.llamagen import open_llamagen
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import make_prompt
from tests.fixtures.windows import build_janus, build_model

LMS = ("llama", "qwen2", "qwen3", "gemma", "gemma3", "mistral", "olmo3", "gpt2", "cohere")
BEDS = ("chameleon", "emu3", "lumina", "glm_image", "janus")
GUIDED = {"guidance_scale": 2.0, "top_k": 10}
ROWS = [[5, 9, 11, 2], [7], [8, 8]]
OTHERS = [[4], [6, 6, 6], [4]]


def build_any(name: str) -> Any:
    if name == "gemma2":
        import transformers as hf

        torch.manual_seed(7)
        config = build_lm("gemma3").config.to_dict() | {"attn_logit_softcapping": 1.5}
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
        names += ("num_attention_heads", "num_key_value_heads", "sliding_window", "layer_types")
        names += ("initializer_range", "attn_logit_softcapping", "pad_token_id", "bos_token_id")
        few: dict[str, Any] = {name: config[name] for name in names}
        model: Any = hf.Gemma2ForCausalLM(hf.Gemma2Config(**few)).eval()
        model.set_attn_implementation("eager")  # sdpa of transformers 5.17 caps nothing
        return model
    if name == "janus":
        return build_janus()
    return build_lm(name) if name in LMS else build_model(name)


def open_window(model: Any, attention: str) -> CausalLMWindow:
    window = CausalLMWindow(model)
    if type(model).__name__.startswith("GlmImage"):
        window = GlmImageWindow(model)
    window.attention = attention  # type: ignore[assignment]
    return window


@torch.no_grad()
def two_passes(window: Any, vocab: int) -> Tensor:
    """Logits of a ragged pass after a prompt, and of one that rolls some of it back."""
    window.reserve(3, 24)
    ids = torch.randint(vocab, (3, 16), generator=torch.Generator().manual_seed(1))
    window.prefill(Pass(ids[:, :8], torch.zeros(1, dtype=torch.int64).expand(3)))
    first = window.forward(Pass(ids[:, 8:13], torch.tensor([8, 5, 7])))
    return torch.cat([first, window.forward(Pass(ids[:, :4], torch.tensor([10, 6, 21])))], 1)


def decode(window: Any, prompt: Prompt, length: int = 20, **options: Any) -> Any:
    noise, params = Noise.from_seed([3, 4, 5], 3), SamplingParams(**options)
    return Jacobi(window=6).sample(window, prompt, length, params=params, noise=noise)


@pytest.mark.parametrize("name", [*LMS, *BEDS, "gemma2"])
def test_logits_are_the_models_own(name: str) -> None:
    model = build_any(name)
    n_ids = min(40, open_window(model, "model").vocab_size)
    own, ours = open_window(model, "model"), open_window(model, "kernel")
    ours.choices = []
    logits, wanted = two_passes(ours, n_ids), two_passes(own, n_ids)
    assert ours.attention_reason == "" and own.attention_reason == "attention='model'"
    assert [layer for layer, _ in ours.choices] == [*range(len(ours.facts.windows))] * 2
    # sums of at most 24 terms in another order; the logits' standard deviation is about 1.5
    assert torch.allclose(logits, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "options"), [("llama", {}), ("gemma3", GUIDED), ("gpt2", {})])
def test_tokens_are_the_same(name: str, options: dict[str, Any]) -> None:
    """In eager passes, and in captured ones: `Replay` raises where one waits for the host."""
    rows, branches = (ROWS + OTHERS, 2) if options else (ROWS, 1)
    model, prompt = build_lm(name), make_prompt(rows, branches)
    plain = decode(open_window(model, "model"), prompt, 30, **options)
    ours = decode(open_window(model, "kernel"), prompt, 30, **options)
    assert ours.tokens.equal(plain.tokens) and ours.stats.passes < 31
    runner = Replay()
    window = CausalLMWindow(model, stride=None, attention="kernel")
    window.setup.runner = runner
    captured = decode(window, prompt, 30, **options)
    assert captured.tokens.equal(plain.tokens) and window.attention_reason == ""
    assert runner.replayed > 3 and len(runner.recorded) == 1


def test_windows_of_image_tokens() -> None:
    model, prompt = build_model("chameleon"), make_prompt(ROWS)
    tokens = []
    for attention in ("model", "kernel"):
        window = ImageTokenWindow(model, range(10, 26), (6,))
        window.attention = attention  # type: ignore[assignment]
        window.begin(prompt)
        tokens.append(decode(window, prompt).tokens)
        assert bool(window.attention_reason) == (attention == "model")
    codes, janus = [], build_janus()
    for attention in ("model", "kernel"):
        image = JanusCodes(janus)
        image.attention = attention  # type: ignore[assignment]
        image.begin(prompt)
        codes.append(decode(image, prompt).tokens)
    assert tokens[0].equal(tokens[1]) and codes[0].equal(codes[1])


@pytest.mark.parametrize(("structural", "n_pads"), [((), 0), ((6,), 1)])
def test_logits_are_padded_where_there_is_a_structural_token(
    structural: tuple[int, ...], n_pads: int
) -> None:
    """torch copies a tensor that it pads with nothing."""
    window = ImageTokenWindow(build_model("chameleon"), range(10, 26), structural)
    window.begin(make_prompt([[5, 9]]))
    window.setup.runner = Replay()
    window.reserve(1, 4)
    made = []
    entries = Pass(torch.tensor([[5, 9]]), torch.tensor([0]))

    def step() -> None:
        made.append(window.forward(entries))

    step()  # the self-check is in the first one
    assert list_operations(step).count("constant_pad_nd") == n_pads
    assert made[0].shape == (1, 2, 16 + n_pads)


def test_llamagen_attends_by_the_kernel() -> None:
    made = {}
    for attention in ("model", "kernel"):
        window, prompt = open_llamagen("text", True, attention)
        made[attention] = decode(window, prompt, 16, guidance_scale=2.0).tokens
        assert (window.attention_reason == "") == (attention == "kernel")
    assert made["kernel"].equal(made["model"])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_long_prompt_is_attended_to_without_a_mask(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rows end at different entries, and where a second chunk sees the first."""
    model = build_lm(name)
    ids = torch.randint(40, (3, 20), generator=torch.Generator().manual_seed(2))
    lengths = torch.tensor([20, 3, 11])
    n_products: list[int] = []

    def attend(query: Tensor, key: Tensor, *args: Any, **options: Any) -> Tensor:
        n_products.append(query.shape[2] * key.shape[2] // (1 + options.get("is_causal", False)))
        return own(query, key, *args, **options)

    own = attention_module.grouped_attention
    monkeypatch.setattr(attention_module, "grouped_attention", attend)
    monkeypatch.setattr(attention_module, "TILE", 3)

    def decode_behind(first: int) -> Tensor:
        monkeypatch.setattr(window_model, "_CAUSAL_FROM", first)
        window = CausalLMWindow(model, fused=True)
        window.reserve(3, 40)
        prefill_together(window, ids, lengths, 36)
        return window.forward(Pass(ids[:, :4], lengths))

    expected = decode_behind(99)
    assert not n_products
    received = decode_behind(2)
    # the first chunk has 12 entries, and a tile of 3 sees window - 1 before it
    windows = CausalLMWindow(model).facts.windows
    most = [72 if window is None else 12 * (window + 2) for window in windows]
    assert sum(n_products) <= sum(min(72, one) for one in most)
    assert torch.allclose(received, expected, rtol=0, atol=1e-5)
