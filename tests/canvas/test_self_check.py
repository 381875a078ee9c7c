"""The self-check of wrapped models refuses those that do not follow positions, masks or cache."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmaccel.contracts import CanvasPass
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.diffusion_lm.masked_lm import MaskedLM
from mmaccel.pipelines.diffusion_lm.models import DreamDenoiser, LLaDADenoiser, SDARDenoiser
from mmaccel.pipelines.transformers_release import CACHE
from mmaccel.samplers.canvas.checks import check_leaks
from tests.fixtures.canvas import MASK
from tests.fixtures.denoisers import TinyDream, TinyLLaDA
from tests.fixtures.sdar import TinySDAR
from tests.fixtures.tiny_lms import build_lm


def bent(**changes: Any) -> Any:
    """A Llama whose forward changes its inputs."""
    model = build_lm("llama", initializer_range=0.35).double()
    forward = model.forward

    def bend(**inputs: Any) -> Any:
        for name, change in changes.items():
            inputs[name] = change(inputs)
        return forward(**inputs)

    model.forward = bend
    return model


def causal(inputs: dict[str, Any]) -> torch.Tensor:
    mask: torch.Tensor = inputs["attention_mask"]
    low = torch.finfo(mask.dtype).min
    at = inputs["position_ids"]
    n = at.shape[1]
    if mask.shape[-1] != n:
        return mask
    return mask.masked_fill((at[:, None] > at[..., None])[:, None], low)


def test_good_models_are_checked_once() -> None:
    model = build_lm("qwen3").double()
    MaskedLM(model, MASK)
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    MaskedLM(model, MASK)
    assert calls == []
    MaskedLM(model, MASK, shift=1)
    assert len(calls) == 8  # three of whole rows and alone, two plain, three scrambled
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        MaskedLM(build_lm("llama").to(dtype), MASK, block=4)
        MaskedLM(build_lm("llama").to(dtype), MASK, shift=1)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("mask", [MASK, None])
def test_good_models_pass_the_leak_check_of_a_run(mask: int | None, dtype: torch.dtype) -> None:
    """Which is for models without a self-check."""

    class Unchecked(MaskedLM):
        is_self_checked = False

    for shift in (0, 1):
        inner = build_lm("qwen3", initializer_range=0.35).to(dtype)
        model = Unchecked(inner, mask, block=4, shift=shift)
        for rows in (1, 3):
            check_leaks(model, rows)
        forward = model.forward

        def attend_to_all(entries: CanvasPass, forward: Any = forward) -> torch.Tensor:
            reads = torch.ones_like(entries.reads)
            reads[..., -1] = False  # padding
            made: torch.Tensor = forward(replace(entries, reads=reads))
            return made

        model.forward = attend_to_all  # type: ignore[method-assign]
        with pytest.raises(UnsupportedModelError):
            check_leaks(model, 1)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"attention_mask": causal}, "no later position|in a batch with a longer one"),
        ({"attention_mask": lambda i: i["attention_mask"] * 0}, "in a batch with a longer one"),
        ({"position_ids": lambda i: torch.zeros_like(i["position_ids"])}, None),
        (
            {"position_ids": lambda i: torch.arange(i["position_ids"].shape[1])[None]},
            "scrambled cache indices|from cached keys",
        ),
        ({CACHE: lambda i: None}, "received a RuntimeError"),
    ],
)
def test_a_decoder_that_ignores_its_inputs_is_refused(changes: Any, words: str | None) -> None:
    if words is None:  # a model without positions is served
        MaskedLM(bent(**changes), MASK)
        return
    with pytest.raises(UnsupportedModelError, match=words):
        MaskedLM(bent(**changes), MASK)


def test_a_causal_model_is_refused() -> None:
    class Causal(TinyLLaDA):
        def forward(self, *args: Any, **inputs: Any) -> SimpleNamespace:
            bias = inputs["attention_bias"]
            return super().forward(*args, **(inputs | {"attention_bias": bias & bias.tril()}))

    model = Causal(40)
    with pytest.raises(UnsupportedModelError, match="depend on no later position"):
        LLaDADenoiser(model, MASK)


def test_a_model_that_reads_later_blocks_is_refused() -> None:
    class Leaking(TinySDAR):
        kernel_dtypes = (torch.float64,)  # a leak is detected in one row too

        def forward(self, *args: Any, **inputs: Any) -> SimpleNamespace:
            mask = inputs["attention_mask"]
            inputs["attention_mask"] = mask.any(2, keepdim=True).expand_as(mask)
            return super().forward(*args, **inputs)

    words = "logits of the first block that depend on later blocks"
    with pytest.raises(UnsupportedModelError, match=words):
        SDARDenoiser(Leaking(40), MASK, block=4)
    with pytest.raises(UnsupportedModelError, match="that depend on later blocks"):
        MaskedLM(
            bent(
                attention_mask=lambda i: (
                    i["attention_mask"].amax(2, keepdim=True).expand_as(i["attention_mask"])
                )
            ),
            MASK,
            block=4,
        )


def test_padding_and_positions_of_a_family_are_checked() -> None:
    class Blind(TinyDream):
        def forward(self, *args: Any, **inputs: Any) -> SimpleNamespace:
            return super().forward(*args, **(inputs | {"attention_mask": "full"}))

    with pytest.raises(UnsupportedModelError, match="in a batch with a longer one than alone"):
        DreamDenoiser(Blind(40), MASK)
    words = "received a RuntimeError .FlashAttention only support"  # a mask that hides nothing
    with pytest.raises(UnsupportedModelError, match=words):
        DreamDenoiser(TinySDAR(40), MASK)
