"""CausalLMWindow against full passes: ragged rows, rollbacks, several architectures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmaccel.contracts import Pass, Prompt, TokenModel
from mmaccel.errors import OptionError, ShapeError, UnsupportedModelError
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.speculative import Speculative
from tests.fixtures.tiny_lms import VOCAB, build_lm

MODELS = ["llama", "qwen3", "gemma", "gemma3", "mistral", "olmo3", "gpt2", "cohere"]
LENGTH, PROMPTS = 26, [5, 3, 1]


def _run_raggedly(window: Any, truth: Tensor, seed: int) -> Tensor:
    """Process known rows raggedly, with wrong drafts between; the logits after each true prefix."""
    random = torch.Generator().manual_seed(seed)
    rows = truth.shape[0]
    lengths = torch.tensor(PROMPTS)
    window.reserve(rows, LENGTH)
    logits = torch.full((rows, LENGTH, window.vocab_size), float("nan"), dtype=window.model.dtype)
    head = truth[:, : max(PROMPTS)]
    first = window.forward(Pass(head, torch.zeros(rows, dtype=torch.int64)))
    logits[:, : max(PROMPTS)] = first  # later positions are written again below
    known = lengths.clone()  # true positions processed so far
    while int(known.min()) < LENGTH:
        width = int(torch.randint(1, 9, (), generator=random))
        n_true = torch.randint(1, width + 1, (rows,), generator=random)
        positions = known[:, None] + torch.arange(width)
        tokens = truth.gather(1, positions.clamp(max=LENGTH - 1))
        wrong = torch.randint(0, VOCAB, tokens.shape, generator=random)
        is_true = torch.arange(width) < n_true[:, None]
        out = window.forward(Pass(torch.where(is_true, tokens, wrong), known))
        for row in range(rows):
            for w in range(int(n_true[row])):
                if int(known[row]) + w < LENGTH:
                    logits[row, int(known[row]) + w] = out[row, w]
        known = (known + n_true).clamp(max=LENGTH)
    return logits


def _truth() -> Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randint(0, VOCAB, (len(PROMPTS), LENGTH), generator=random)


@torch.no_grad()
def _full(model: Any, truth: Tensor) -> Tensor:
    return torch.cat([model(input_ids=row[None]).logits for row in truth])


WAYS: list[tuple[str, Any]] = [("sdpa", "auto"), ("sdpa", 8), ("eager", None)]


@pytest.mark.parametrize(
    ("name", "attention", "stride"),
    [(name, *WAYS[0]) for name in MODELS]
    + [(name, *way) for name in ("llama", "gemma3", "gpt2") for way in WAYS[1:]],
)
def test_ragged_logits_equal_full_passes(name: str, attention: str, stride: Any) -> None:
    model = build_lm(name, attn_implementation=attention)
    fine = 1e-12 if attention == "sdpa" else 1e-6  # eager takes its softmax in float32 always
    for dtype, most in ((torch.float32, 1e-5), (torch.float64, fine)):
        model = model.to(dtype)
        expected = _full(model, _truth())
        found = _run_raggedly(CausalLMWindow(model, stride=stride), _truth(), seed=1)
        scale = expected.abs().amax().clamp(min=1.0)
        assert float((found - expected).abs().amax() / scale) <= most


@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_a_narrow_vocabulary_is_the_first_part_of_the_logits(name: str) -> None:
    model = build_lm(name).double()
    window = CausalLMWindow(model, vocab_size=17)
    assert window.vocab_size == 17 and isinstance(window, TokenModel)
    shapes: list[int] = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, out: shapes.append(out.shape[-1])
    )
    found = _run_raggedly(window, _truth(), seed=2)
    hook.remove()
    torch.testing.assert_close(found, _full(model, _truth())[..., :17], rtol=0, atol=1e-10)
    assert set(shapes) == {17}  # the rest was not computed
    assert model.get_output_embeddings().weight.shape[0] == VOCAB


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_pass_may_reach_beyond_the_end(name: str) -> None:
    limit = "n_positions" if name == "gpt2" else "max_position_embeddings"
    model = build_lm(name, **{limit: LENGTH}).double()
    truth = _truth()
    window = CausalLMWindow(model)
    window.reserve(3, LENGTH)
    window.forward(Pass(truth[:, :20], torch.zeros(3, dtype=torch.int64)))
    start = torch.tensor([20, 20, 4])
    tokens = truth.gather(1, (start[:, None] + torch.arange(16)).clamp(max=LENGTH - 1))
    for _ in range(2):  # the second time it meets what the first time wrote beyond
        out = window.forward(Pass(tokens, start))
    full = _full(model, truth)
    torch.testing.assert_close(out[:2, :6], full[:2, 20:], rtol=0, atol=1e-10)
    torch.testing.assert_close(out[2], full[2, 4:20], rtol=0, atol=1e-10)


def test_memory_is_allocated_once() -> None:
    window = CausalLMWindow(build_lm("llama"), stride=None)
    window.reserve(2, 40)
    addresses = set()
    for start in (0, 8, 3):
        out = window.forward(Pass(torch.ones(2, 8, dtype=torch.int64), torch.tensor([start, 0])))
        assert out.shape == (2, 8, VOCAB) and not out.requires_grad
        layers = window.run_caches().layers
        assert len(layers) == 2 and layers[0].keys.shape[0] == 2 * 42
        addresses.add(tuple(layer.keys.data_ptr() for layer in layers))
    assert len(addresses) == 1


@pytest.mark.parametrize(("name", "vocab_size"), [("llama", 17), ("gpt2", None)])
def test_no_logits_of_the_prompt_are_computed(name: str, vocab_size: int | None) -> None:
    model, draft = build_lm(name), build_lm(name)
    widths: dict[str, list[int]] = {"model": [], "draft": []}
    for key, one in (("model", model), ("draft", draft)):
        one.get_output_embeddings().register_forward_hook(
            lambda module, inputs, out, key=key: widths[key].append(out.shape[1])
        )
    policy = Speculative(4, CausalLMWindow(draft, vocab_size=vocab_size))
    prompt = Prompt(_truth()[:, :12] % 17, torch.tensor([12, 9, 5]))
    window = CausalLMWindow(model, vocab_size=vocab_size)
    policy.sample(window, prompt, 6, params=SamplingParams(), noise=Noise.from_seed(0, 3))
    assert widths["model"][0] == widths["draft"][0] == 1
    assert max(widths["model"][1:]) <= 4 and max(widths["draft"][1:]) <= 2


def _unsuitable() -> dict[str, Any]:
    import transformers as hf

    small = dict(hidden_size=16, num_hidden_layers=2, vocab_size=VOCAB, num_attention_heads=2)
    t5 = dict(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=VOCAB)
    flex = build_lm("llama")
    flex.config._attn_implementation = "flex_attention"
    chunked = build_lm("llama", attention_chunk_size=4)
    moshi = hf.MoshiConfig(
        **small, num_key_value_heads=2, head_dim=8, ffn_dim=64, sliding_window=12, pad_token_id=0
    )
    one_mask = build_lm(
        "llama", sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    )
    return {
        "other kinds .*LinearAttention": build_lm("lfm2"),
        "attention is chunked": chunked,
        "whose forward takes one mask": one_mask,
        "whose cache slides, but whose masks do not": hf.MoshiForCausalLM(moshi),
        "takes no position_ids": hf.MambaForCausalLM(
            hf.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=VOCAB)
        ),
        "has an encoder": hf.T5ForConditionalGeneration(hf.T5Config(**t5)),
        "no linear language-modelling head": build_lm("llama").model,
        "both directions": hf.BertLMHeadModel(hf.BertConfig(**small, intermediate_size=16)),
        "flex_attention": flex,
        "received Linear": nn.Linear(2, 2),
        "received str": "scenes",
    }


def test_what_is_no_causal_lm_with_ordinary_attention_is_refused() -> None:
    for reason, model in _unsuitable().items():
        with pytest.raises(UnsupportedModelError, match=f"model: expected .*{reason}.*; "):
            CausalLMWindow(model)


def test_bad_arguments_are_refused() -> None:
    model = build_lm("gpt2")
    for size in (0, VOCAB + 1):
        with pytest.raises(
            OptionError, match=f"expected an integer in 1..{VOCAB}, received {size}"
        ):
            CausalLMWindow(model, vocab_size=size)
    with pytest.raises(OptionError, match="stride: expected an integer >= 1"):
        CausalLMWindow(model, stride=0)
    window = CausalLMWindow(model)
    one = Pass(torch.ones(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ShapeError, match="reserve first"):
        window.forward(one)
    with pytest.raises(OptionError, match="at most 96 .*, received 97"):
        window.reserve(1, 97)
    with pytest.raises(OptionError, match="at least 1 row"):
        window.reserve(0, 5)
    window.reserve(2, 96)
    with pytest.raises(ShapeError, match="expected 2 rows as reserved"):
        window.forward(one)
    model.train()
    with pytest.raises(OptionError, match="call model.eval"):
        window.reserve(1, 5)
