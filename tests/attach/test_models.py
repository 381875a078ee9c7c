"""Models that no policy can serve: attaching works, the original runs."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import UnsupportedModelError
from tests.fixtures.tiny_lms import PROMPTS, PassCounter, build_lm, falls_back

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
    viewing = hf.GPTNeoXJapaneseConfig(**_WIDE)
    encoder = hf.T5ForConditionalGeneration(t5).eval()
    return {
        "layers of other kinds": (build_lm("lfm2"), PROMPTS),
        "own _sample": (Special(build_lm("llama").config).eval(), PROMPTS),
        "has an encoder": (encoder, PROMPTS),
        "keys that lie in one piece": (hf.GPTNeoXJapaneseForCausalLM(viewing).eval(), PROMPTS),
    }


_SMALL: dict[str, Any] = dict(
    vocab_size=40, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.25,
    init_std=0.25, max_position_embeddings=96, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
_WIDE = _SMALL | dict(hidden_size=32, intermediate_size=64)
_READ_LENGTH: dict[str, tuple[str, dict[str, Any]]] = {
    "OPT": ("OPTForCausalLM", _SMALL | dict(hidden_size=32, ffn_dim=64, word_embed_proj_dim=32)),
    "Roberta": ("RobertaForCausalLM", _WIDE | dict(is_decoder=True, pad_token_id=1)),
}


@pytest.mark.parametrize("name", list(_READ_LENGTH))
def test_models_that_read_their_caches_length_are_served(name: str) -> None:
    import transformers as hf

    head, arguments = _READ_LENGTH[name]
    torch.manual_seed(7)
    model = getattr(hf, head)(getattr(hf, f"{name}Config")(**arguments)).eval()
    long = SHORT | {"max_new_tokens": 24}
    plain = model.generate(**PROMPTS, **long)
    assert mmaccel.supports(model) and len(set(plain[0].tolist())) > 3
    with mmaccel.attach(model, mmaccel.Jacobi(window=5), strict=True):
        assert torch.equal(model.generate(**PROMPTS, **long), plain)


@pytest.mark.parametrize(
    "reason",
    ["layers of other kinds", "own _sample", "has an encoder", "keys that lie in one piece"],
)
def test_models_that_only_the_original_can_serve(reason: str) -> None:
    model, inputs = _foreign_models()[reason]
    with PassCounter(model) as counter:
        plain = model.generate(**inputs, **SHORT)
    with falls_back(model, reason) as run:
        assert torch.equal(model.generate(**inputs, **SHORT), plain)
    assert run.stats.passes == counter.passes
    with pytest.raises(UnsupportedModelError, match=reason):
        mmaccel.attach(model, mmaccel.Jacobi(window=4), strict=True)
    assert not mmaccel.supports(model) and reason in mmaccel.supports(model).reason


def test_methods_of_one_instance_are_noticed() -> None:
    """Adapters that add prompts replace methods like this during a call."""
    model = build_lm("llama")
    assert mmaccel.supports(model)
    own = model.prepare_inputs_for_generation

    def prepare(*args: Any, **options: Any) -> Any:
        inputs = own(*args, **options)
        return inputs | {"input_ids": (inputs["input_ids"] + 1) % 40}

    prepare.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    with falls_back(model, "own prepare_inputs_for_generation"):
        model.prepare_inputs_for_generation = prepare
        ours = model.generate(**PROMPTS, **SHORT)
    assert torch.equal(ours, model.generate(**PROMPTS, **SHORT))
