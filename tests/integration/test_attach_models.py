"""Models that no policy can serve: attaching works, the original runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import AttachError, UnsupportedModelError
from tests.tiny_lms import build_lm, left_padded

PROMPTS = left_padded([[5, 6], [4, 5, 6, 7], [9, 8, 7]])
SHORT: dict[str, Any] = dict(max_new_tokens=6, do_sample=False)


def _foreign_models() -> dict[str, tuple[Any, dict[str, Any]]]:
    import transformers as hf

    class Special(hf.LlamaForCausalLM):
        def _sample(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return super()._sample(input_ids, *args, **kwargs)

    t5 = hf.T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=40,
        decoder_start_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    encoder = hf.T5ForConditionalGeneration(t5).eval()
    return {
        "sliding windows": (build_lm("mistral"), PROMPTS),
        "own _sample": (Special(build_lm("llama").config).eval(), PROMPTS),
        "has an encoder": (encoder, PROMPTS),
    }


@pytest.mark.parametrize("reason", ["sliding windows", "own _sample", "has an encoder"])
def test_models_that_only_the_original_can_serve(reason: str) -> None:
    model, inputs = _foreign_models()[reason]
    plain = model.generate(**inputs, **SHORT)
    with mmaccel.attach(model, mmaccel.Jacobi(window=4)) as run:
        with pytest.warns(UserWarning, match="mmaccel"):
            assert torch.equal(model.generate(**inputs, **SHORT), plain)
    assert reason in run.stats.fallbacks[0] and run.stats.passes == 6
    with pytest.raises(UnsupportedModelError, match=reason):
        mmaccel.attach(model, mmaccel.Jacobi(window=4), strict=True)
    assert not mmaccel.supports(model) and reason in mmaccel.supports(model).reason


def test_dropout_in_training_mode_is_left_to_the_original() -> None:
    model = build_lm("gpt2").train()
    with mmaccel.attach(model, mmaccel.Jacobi(window=4), strict=True):
        with pytest.raises(AttachError, match="training mode with dropout"):
            model.generate(**PROMPTS, **SHORT)
        model.eval()
        model.generate(**PROMPTS, **SHORT)
