"""Window attention restores the configuration, affects no other call, and refuses with a reason."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import CausalLMWindow
from mmaccel.contracts import Pass
from mmaccel.errors import MissingBackendError, OptionError, UnsupportedModelError
from mmaccel.kernels import dispatch
from mmaccel.pipelines.hosts.causal_lm.self_check import check_windows
from mmaccel.pipelines.hosts.layers.attention import WindowPass
from mmaccel.pipelines.hosts.layers.attention_function import NAME, window_attention_in
from mmaccel.pipelines.hosts.layers.attention_name import find_configs
from mmaccel.pipelines.hosts.layers.store import KVCacheLayout, WindowLayer
from mmaccel.pipelines.models.imagegpt import ImageGPT
from tests.fixtures.tiny_lms import PassCounter, build_lm, left_padded
from tests.fixtures.windows import build_model

PADDED = left_padded([[5, 6, 7, 8, 9], [4, 5], [7, 7, 8]])
IDS, START = torch.tensor([[5, 6, 7], [8, 9, 4]]), torch.tensor([0, 0])


def names(model: Any) -> list[str]:
    """Of the attention of every configuration in and below a model."""
    configs = [*find_configs(model), model.config, model.config.get_text_config()]
    return [config._attn_implementation for config in configs]


def run(model: Any, attention: Any = "kernel") -> Tensor:
    window = CausalLMWindow(model, attention=attention)
    window.reserve(2, 12)
    return window.forward(Pass(IDS, START))


def reason_of(model: Any, attention: Any = "kernel") -> str:
    window = CausalLMWindow(model, attention=attention)
    window.reserve(2, 12)
    return window.attention_reason


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_another_call_under_the_name_keeps_its_padding(name: str) -> None:
    """Without a mask function under the name, padding would be attended to."""
    model = build_lm(name)
    own, bare = model(**PADDED).logits, model(PADDED["input_ids"]).logits
    run(model)  # registers
    model.config._attn_implementation = NAME
    seen = PADDED["attention_mask"].bool()
    assert torch.allclose(model(**PADDED).logits[seen], own[seen], rtol=0, atol=1e-5)
    assert float((bare - own)[seen].abs().max()) > 0.1


@pytest.mark.parametrize("build", [lambda: build_lm("gemma3"), lambda: build_model("emu3")])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_configuration_is_as_before(build: Any, implementation: str) -> None:
    model = build()
    model.set_attn_implementation(implementation)
    before, saved = names(model), copy.deepcopy(model.config.to_dict())
    pickled = pickle.dumps(model)
    during = []
    layer = next(m for m in model.modules() if hasattr(m, "layer_idx"))
    hook = layer.register_forward_hook(lambda *_: during.append(names(model)))
    run(model)
    hook.remove()
    assert during[-1].count(NAME) >= len(find_configs(model)) > 0
    assert names(model) == before and set(before) == {implementation}
    assert model.config.to_dict() == saved and NAME not in repr(vars(model.config))
    assert len(pickle.dumps(model)) == len(pickled)

    window = CausalLMWindow(model, attention="kernel")
    window.reserve(2, 12)
    hook = layer.register_forward_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        window.forward(Pass(IDS, START))
    hook.remove()
    assert names(model) == before


def _raise(*_: object) -> None:
    raise ZeroDivisionError("no way")


@torch.no_grad()
def test_a_model_with_the_same_configuration_is_left_alone() -> None:
    """In the middle of a pass of ours another thread runs a model that shares its configuration."""
    model, found = build_lm("llama"), []
    other, apart = type(model)(model.config).eval(), build_lm("llama")
    own = other(**PADDED).logits
    window = CausalLMWindow(model, attention="kernel")
    window.reserve(2, 12)

    @torch.no_grad()
    def meanwhile() -> None:
        found.append((names(apart), other.config._attn_implementation, other(**PADDED).logits))

    def in_between(*_: object) -> None:
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()

    model.model.layers[0].register_forward_hook(in_between)
    window.forward(Pass(IDS, START))
    seen = PADDED["attention_mask"].bool()
    ((others, shared, logits),) = found
    assert NAME not in others and shared == NAME
    assert torch.allclose(logits[seen], own[seen], rtol=0, atol=1e-5)


def test_refusals_say_why() -> None:
    window = ImageGPT().wrap(build_model("imagegpt"))
    window.attention = "kernel"
    window.reserve(2, 12)
    assert "0 of 4 calls of attention" in window.attention_reason
    assert "float64" in reason_of(build_lm("llama").double())
    short = CausalLMWindow(build_lm("llama", max_position_embeddings=8), attention="kernel")
    short.reserve(2, 8)
    assert short.attention_reason == "the model has 8 positions; a self-check needs 9"
    model = build_lm("llama")
    for layer in model.model.layers:  # changes the attention output under the kernel alone
        layer.self_attn.register_forward_hook(_halve)
    assert "under the kernel logits" in reason_of(model)


def test_what_raises_under_the_kernel_alone_is_checked_once() -> None:
    model = build_lm("llama")
    tries: list[str] = []

    def complain(module: Any, *_: Any) -> None:
        if module.config._attn_implementation == NAME:
            tries.append(NAME)
            raise ValueError("expected a mask of another size")

    model.model.layers[1].self_attn.register_forward_pre_hook(complain)
    for _ in range(3):
        assert "under the kernel a ValueError (expected a mask of" in reason_of(model)
    assert tries == [NAME] and run(model).equal(run(model, "model"))


def test_an_error_of_the_device_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the self-check of the kernel nor by that of the windows."""
    model = build_lm("llama")

    def lose(module: Any, *_: Any) -> None:
        if module.config._attn_implementation == NAME or lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    lost: list[bool] = []
    model.model.layers[1].self_attn.register_forward_pre_hook(lose)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        reason_of(model)
    lost.append(True)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        check_windows(model, CausalLMWindow(model, attention="model"))


def _halve(module: Any, _: Any, out: Any) -> Any:
    return (out[0] * (0.5 if module.config._attn_implementation == NAME else 1.0), *out[1:])


@pytest.mark.parametrize("option", ["is_causal", "sinks", "layer_idx", "scale", "dropout"])
def test_arguments_the_kernel_cannot_serve_are_refused(option: str) -> None:
    from transformers import AttentionInterface

    model = build_lm("llama")
    run(model)
    attend: Any = AttentionInterface()[NAME]
    layer, q = model.model.layers[0].self_attn, torch.randn(2, 4, 3, 8)
    mask, options = None, {"scaling": 0.3}
    if option == "layer_idx":
        layer = torch.nn.Identity()
    refused: dict[str, Any] = {
        "is_causal": {"is_causal": False},
        "sinks": {"s_aux": torch.zeros(4)},
        "scale": {"scaling": torch.tensor(0.3)},
        "dropout": {"dropout": 0.1},
    }
    stores = [WindowLayer(KVCacheLayout(2, 8))] * 2
    with window_attention_in([], WindowPass(START, [None, None], stores, by_kernel=True)):
        attend(model.model.layers[0].self_attn, q, q, q, mask, **options)
        with pytest.raises(UnsupportedModelError, match="expected plain causal attention"):
            attend(layer, q, q, q, mask, **(options | refused.get(option, {})))
        with pytest.raises(UnsupportedModelError, match="a mask of its own"):
            attend(layer, q, q, q, torch.zeros(2, 1, 3, 3), **options)


def test_a_model_is_checked_once_and_again_with_another_attention() -> None:
    model = build_lm("llama")
    with PassCounter(model) as counter:
        assert reason_of(model, "auto") == "the model is on cpu" and counter.passes == 0
        assert reason_of(model) == reason_of(model) == "" and counter.passes == 4
        model.set_attn_implementation("eager")
        assert reason_of(model) == "" and counter.passes == 8


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMACCEL_KERNELS", "torch")
    assert reason_of(build_lm("llama"), "auto") == "MMACCEL_KERNELS=torch"
    assert reason_of(build_lm("llama")) == ""
    monkeypatch.setenv("MMACCEL_KERNELS", "triton")
    for kind in ("auto", "kernel"):
        with pytest.raises(MissingBackendError, match="MMACCEL_KERNELS=triton"):
            reason_of(build_lm("llama"), kind)
    with pytest.raises(MissingBackendError, match="MMACCEL_KERNELS=triton"):
        check_windows(model := build_lm("llama"), CausalLMWindow(model))
    assert reason_of(build_lm("llama"), "model") == "attention='model'"
    with pytest.raises(OptionError, match="auto, model, kernel"):
        CausalLMWindow(build_lm("llama"), attention="flash")  # type: ignore[arg-type]


def test_forced_triton_raises_for_a_model_with_other_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even where the kernel could run: a forced kernel is never replaced silently."""
    model = build_lm("llama")
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(_halve)
    assert "under the kernel logits" in reason_of(model)
    monkeypatch.setattr(dispatch, "mode", lambda: "triton")
    monkeypatch.setattr(dispatch, "find_obstacle", lambda _: None)
    monkeypatch.setattr(
        dispatch, "run", lambda function, *args, **options: function(*args, **options)
    )
    monkeypatch.setattr(dispatch, "decide", lambda *_, **__: dispatch.Choice("triton", "pretended"))
    for kind in ("auto", "kernel"):
        with pytest.raises(MissingBackendError, match="received LlamaForCausalLM: under the"):
            reason_of(model, kind)
    assert reason_of(build_lm("llama"), "auto") == ""
