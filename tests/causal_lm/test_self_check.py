"""Self-checks detect models whose windows would give silently wrong logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.causal_lm.self_check import check_windows
from tests.fixtures.tiny_lms import PassCounter, build_lm, falls_back

_NEO: dict[str, Any] = dict(
    vocab_size=48, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=96,
    attention_types=[[["global", "local"], 1]], window_size=4, initializer_range=0.25,
    bos_token_id=1, eos_token_id=3, pad_token_id=0,
)  # fmt: skip


def check(model: Any) -> None:
    check_windows(model, CausalLMWindow(model))


def build_gpt_neo(**changes: Any) -> Any:
    """GPT-Neo, which builds a causal mask of its own from the cache's length."""
    import transformers as hf

    torch.manual_seed(7)
    return hf.GPTNeoForCausalLM(hf.GPTNeoConfig(**(_NEO | changes))).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_models_own_mask_is_detected(dtype: torch.dtype) -> None:
    model = build_gpt_neo().to(dtype)
    assert "standard deviations off" in mmaccel.supports(model).reason
    with pytest.raises(UnsupportedModelError, match="standard deviations off"):
        mmaccel.attach(model, "jacobi", strict=True)
    ids = torch.full((2, 1), 5)
    plain = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
    with falls_back(model, "standard deviations off"):
        ours = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("name", ["gemma", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_good_models_pass_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    check(build_lm(name).to(dtype))


def test_a_model_is_checked_once_and_again_with_another_attention() -> None:
    model = build_lm("llama")
    with PassCounter(model) as counter:
        check(model)
        assert mmaccel.supports(model)
        mmaccel.attach(model, "jacobi").detach()
        assert counter.passes == 0  # `PassCounter` ran the self-check
        model.set_attn_implementation("eager")
        check(model)
        assert counter.passes == 3


def test_a_model_that_raises_or_has_no_weights_is_refused_with_the_reason() -> None:
    model = build_lm("llama")
    model.model.layers[0].register_forward_pre_hook(_raise)
    assert "received a ZeroDivisionError (no way)" in mmaccel.supports(model).reason
    assert "no weights" in mmaccel.supports(build_lm("llama").to("meta")).reason


def _raise(*_: object) -> None:
    raise ZeroDivisionError("no way")


def test_the_self_check_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    check(build_lm("qwen2"))
    torch.manual_seed(7)  # as build_lm leaves it, after drawing weights
    check(build_lm("qwen2"))
    after = torch.get_rng_state()
    build_lm("qwen2")
    assert torch.equal(torch.get_rng_state(), after)
    torch.set_rng_state(before)


def test_what_raised_once_is_checked_again() -> None:
    model = build_lm("llama")
    hook = model.model.layers[0].register_forward_pre_hook(_raise)
    assert not mmaccel.supports(model)
    hook.remove()
    assert mmaccel.supports(model)


def _masking(model: Any, fill: float) -> Any:
    """The model with one id masked, as in models with image ids."""

    def mask(_: Any, __: Any, out: Any) -> None:
        out.logits[..., 7] = fill

    model.register_forward_hook(mask)
    return model


@pytest.mark.parametrize("fill", [-float("inf"), torch.finfo(torch.float32).min, -1e4])
def test_a_masked_id_hides_nothing(fill: float) -> None:
    assert "standard deviations off" in mmaccel.supports(_masking(build_gpt_neo(), fill)).reason
    assert mmaccel.supports(_masking(build_lm("llama"), fill))


def test_ids_that_only_windows_mask_are_found() -> None:
    model = build_lm("llama")

    def mask(_: Any, __: Any, options: Any, out: Any) -> None:
        if options.get("use_cache"):
            out.logits[..., 7] = -1e9

    model.register_forward_hook(mask, with_kwargs=True)
    assert "inf standard deviations off" in mmaccel.supports(model).reason


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_where_nothing_can_be_compared_the_next_self_check_decides(value: float) -> None:
    model = build_gpt_neo()
    good = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    assert mmaccel.supports(model)  # decoding raises NumericsError
    model.load_state_dict(good)
    assert not mmaccel.supports(model)


def test_unusual_models_are_checked_too() -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: Any) -> Any:
            return self.inner(ids)

    model = build_lm("llama")
    model.set_input_embeddings(Wrapped(model.get_input_embeddings()))
    assert mmaccel.supports(model)
    assert mmaccel.supports(build_lm("llama", max_position_embeddings=8))
    with torch.device("meta"):
        assert mmaccel.supports(model) and mmaccel.supports(build_lm_on_the_cpu())


def build_lm_on_the_cpu() -> Any:
    with torch.device("cpu"):
        return build_lm("qwen2")


def test_attention_that_is_local_by_the_length_of_the_cache_runs_the_original() -> None:
    """GPT-Neo's local layers: right on nine tokens, other tokens after their window."""
    model = build_gpt_neo(window_size=16, eos_token_id=None)
    ids, options = torch.tensor([[1, 2, 3]]), {"max_new_tokens": 40, "do_sample": False}
    own = model.generate(ids, **options)
    with falls_back(model, "local attention", seed=1):
        made = model.generate(ids, **options)
    assert made.equal(own)
