"""Calls of denoisers that `attach` gave a `generate`: their arguments, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.errors import OptionError, ShapeError
from mmaccel.pipelines.diffusion_lm.models import LLaDADenoiser
from tests.fixtures.canvas import PROMPTS
from tests.fixtures.denoisers import LLaDABed

VOCAB, MASK, LENGTH = 40, 39, 6
IDS = torch.tensor([PROMPTS[2]])


def llada(**config: Any) -> Any:
    """A bed that names itself."""
    return LLaDABed(VOCAB, **({"model_type": "llada", "mask_token_id": MASK} | config))


def test_defaults_come_from_the_configuration_of_call_and_model() -> None:
    from transformers import GenerationConfig

    model = llada()
    with mmaccel.attach(model, mmaccel.Stepwise(), seed=2):

        def made(config: Any = None, **options: Any) -> list[int]:
            tokens: list[int] = model.generate(IDS, config, **options)[
                0, len(PROMPTS[2]) :
            ].tolist()
            return tokens

        greedy, drawn = made(gen_length=LENGTH), made(max_length=5 + LENGTH, do_sample=True)
        cold = made(max_new_tokens=LENGTH, temperature=0.3)
        likely = made(max_new_tokens=LENGTH, temperature=1.0, top_k=2)
        assert len({str(tokens) for tokens in (greedy, drawn, cold, likely)}) == 4
        model.generation_config = GenerationConfig(
            do_sample=True, temperature=0.3, max_new_tokens=LENGTH
        )
        assert made() == cold and made(temperature=1.0) == drawn and made(do_sample=True) == cold
        assert made(temperature=0) == made(do_sample=False, temperature=0.3) == greedy
        assert made(GenerationConfig(top_k=2, temperature=1.0)) == likely
        assert made(GenerationConfig(do_sample=False)) == greedy
        assert len(made(max_new_tokens=2)) == len(made(max_length=7)) == 2
        model.generation_config = SimpleNamespace(temperature=0.0, max_length=11, do_sample=None)
        assert made() == greedy and made(do_sample=True) == drawn and made(temperature=0.3) == cold
        model.generation_config.repetition_penalty = 1.1
        with mmaccel.attach(LLaDADenoiser(model, MASK), mmaccel.Stepwise()) as other:
            other._target.generate(IDS)
            assert "repetition_penalty 1.1" in other.stats.notes[0]


def test_seeds_without_one_are_torchs() -> None:
    model = llada()
    with mmaccel.attach(model, mmaccel.Stepwise()):
        drawn = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            drawn.append(model.generate(IDS, max_new_tokens=LENGTH, temperature=1.0))
        assert drawn[0].equal(drawn[1]) and not drawn[0].equal(drawn[2])
        before = torch.get_rng_state()
        model.generate(IDS, max_new_tokens=LENGTH)
        assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"steps": 8}, r"attach MaskedParallel\(steps=\)"),
        ({"block_length": 4}, r"attach EntropyBounded\(block=\)"),
        ({"dual_cache": True}, r"attach EntropyBounded\(cache=\)"),
        ({"threshold": 0.9}, r"attach ConfidentParallel\(threshold=\)"),
        ({"remasking": "random"}, "the policy is the rule"),
        ({"alg": "entropy"}, "the policy is the rule"),
        ({"cfg_scale": 1.5}, "prompts of mask tokens"),
        ({"mask_id": MASK}, "made with mask_token="),
        ({"num_beams": 2}, "one canvas a row"),
        ({"streamer": print}, "any order"),
        ({"generation_config": SimpleNamespace(num_beams=4)}, "one canvas a row"),
        ({"generation_config": SimpleNamespace(repetition_penalty=1.1)}, "no prefix"),
        ({"gen_length": 4}, "two names of one number"),
        ({"max_new_tokens": None}, "how many tokens"),
        ({"max_new_tokens": 0}, "at least 1 token"),
        ({"max_new_tokens": 2.0}, "at least 1 token"),
        ({"max_new_tokens": None, "max_length": 5}, "beside 5 columns"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"eos_token_id": "a"}, "expected ids"),
        ({"input_ids": torch.tensor([[5, MASK]])}, "no mask token"),
        ({"input_ids": torch.tensor([5, 6])}, "B, T"),
        ({"input_ids": [[5, 6]]}, "B, T"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, "B, T"),
        ({"attention_mask": torch.ones(1, 4)}, "attention_mask"),
        ({"attention_mask": torch.zeros(1, 5)}, "at least one token"),
        ({"no_such": None}, "unexpected keyword argument 'no_such'"),
        ({"inputs": IDS}, "received both"),
        ({"input_ids": None}, "received neither"),
    ],
)
def test_arguments_that_cannot_be_served_are_refused(options: dict[str, Any], match: str) -> None:
    model = llada()
    kinds = (OptionError, ShapeError, TypeError)
    asked: dict[str, Any] = {"input_ids": IDS, "max_new_tokens": LENGTH}
    with mmaccel.attach(model, mmaccel.EntropyBounded()) as handle:
        before = model.calls
        with pytest.raises(kinds, match=match):
            model.generate(**(asked | options))
        assert model.calls == before and handle.history == []
        same = {"num_beams": 1, "steps": None, "use_cache": True, "cfg_scale": 0.0}
        assert model.generate(**asked, **same).equal(model.generate(**asked))


def test_early_ends_are_a_call_s_affair() -> None:
    """Whether a token ends rows is known at the call; attaching asks for none."""
    model = llada()
    ids, end = torch.tensor([[5, 9, 7]]), list(range(VOCAB - 1))
    with mmaccel.attach(model, mmaccel.EntropyBounded(0.0, end_threshold=0.5)) as handle:
        out = model.generate(ids, max_new_tokens=LENGTH, eos_token_id=end)
        assert out.shape == (1, 4) and handle.stats is not None and handle.stats.passes == 1
        with pytest.raises(OptionError, match="expected a prompt with stop tokens"):
            model.generate(ids, max_new_tokens=LENGTH)
