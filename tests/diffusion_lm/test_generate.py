"""`generate` of denoisers, and of models that are served through one: tokens and arguments."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import mmaccel
from mmaccel.errors import BusyError, OptionError
from mmaccel.pipelines.hosts.diffusion_lm.arguments import DENOISER
from mmaccel.pipelines.hosts.diffusion_lm.masked_lm import MaskedLM
from mmaccel.pipelines.hosts.diffusion_lm.models import LLaDADenoiser, SDARDenoiser
from mmaccel.pipelines.hosts.diffusion_lm.registry import find_denoiser, open_denoiser
from mmaccel.pipelines.hosts.generate_call import join_branches
from mmaccel.policies import CanvasInterrupt
from tests.fixtures.canvas import PROMPTS, run
from tests.fixtures.denoiser_targets import (
    CODES,
    FIRST,
    LENGTH,
    MASK,
    PADDED,
    TARGETS,
    VOCAB,
    WIDE,
    images,
    llada,
    negative,
)
from tests.fixtures.denoisers import TinyLLaDA
from tests.fixtures.tiny_lms import PAD, build_lm, left_padded

IDS = torch.tensor([PROMPTS[2]])
ALIKE = [[9, 2, 5, 1, 1, 4, 7], [13, 3, 9, 9, 2], [5]]  # end alike in blocks of 4
OTHERS = [[9, 2, 5], [13, 3, 9, 9, 2, 1, 7], [5]]
DRAWN: dict[str, Any] = {"max_new_tokens": LENGTH, "temperature": 1.0}
SIDES = ((7, 0), (0, 7), (3, 4))
FAMILIES = ["llada", "dream", "sdar", "fast-dllm", "masked-lm"]
FIRST_ARGUMENTS = ["inputs", "generation_config", "input_ids"]


def right_padded(rows: list[list[int]]) -> dict[str, Tensor]:
    """Padding after the prompts."""
    flipped = left_padded([row[::-1] for row in rows])
    return {name: value.flip(1) for name, value in flipped.items()}


def padded(inputs: dict[str, Tensor], sides: tuple[int, int]) -> dict[str, Tensor]:
    """More columns on both sides, which are padding in every row."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    wide = torch.where(pad(mask, sides) == 0, -100, pad(ids, sides))  # some code's padding
    return {"input_ids": wide, "attention_mask": pad(mask, sides)}


@pytest.mark.parametrize("name", TARGETS)
def test_tokens_are_those_of_the_policy_called_directly(name: str) -> None:
    """Under padding on the left and on the right."""
    target = TARGETS[name]()
    policy = mmaccel.EntropyBounded(gamma=0.4)
    expected = run(policy, open_denoiser(target), LENGTH, 1.0).tokens
    with mmaccel.attach(target, policy, seed=7) as handle:
        for inputs in (PADDED, right_padded(PROMPTS)):
            out = target.generate(**inputs, **DRAWN)
            assert out.dtype == torch.int64 and out[:, :WIDE].equal(inputs["input_ids"])
            assert out[:, WIDE:].equal(expected)
    assert len(handle.history) == 2 and handle.stats is handle.history[-1]
    assert handle.stats.tokens == 3 * LENGTH and 0 < handle.stats.passes <= LENGTH
    assert handle.stats.policy == repr(policy)
    assert mmaccel.supports(target).family == type(open_denoiser(target)).__name__


@pytest.mark.parametrize("name", FAMILIES)
def test_guided_tokens_are_those_of_two_branches(name: str) -> None:
    target, policy = TARGETS[name](), mmaccel.EntropyBounded(0.4)
    expected = run(policy, open_denoiser(target), LENGTH, 1.0, guided=True, others=ALIKE).tokens
    with mmaccel.attach(target, policy, seed=7) as handle:
        for pad_rows in (left_padded, right_padded):
            inputs = pad_rows(PROMPTS)
            out = target.generate(**inputs, **DRAWN, **negative(pad_rows(ALIKE)))
            assert out[:, :WIDE].equal(inputs["input_ids"]) and out[:, WIDE:].equal(expected)
        assert handle.stats.branches == 2
        plain = target.generate(**PADDED, **DRAWN)[:, WIDE:]
        same = target.generate(**PADDED, **DRAWN, guidance_scale=1)
    assert not plain.equal(expected) and same[:, WIDE:].equal(plain)


@pytest.mark.parametrize("family", ["mmada", "lumina"])
def test_images_are_made_in_the_models_ids(family: str) -> None:
    """Guidance as MMaDA and Lumina-DiMOO use it; scale 1 + w is their w."""
    denoiser = images(family)
    rows = [
        [[int(denoiser.to_canvas(torch.tensor(i))) for i in row] for row in side]
        for side in (PROMPTS, ALIKE)
    ]
    for guidance in ({}, negative(left_padded(ALIKE))):
        made = run(
            mmaccel.Stepwise(), denoiser, 4, 1.0, bool(guidance), prompts=rows[0], others=rows[1]
        )
        with mmaccel.attach(denoiser, mmaccel.Stepwise(), seed=7):
            out = denoiser.generate(**PADDED, **guidance, max_new_tokens=4, temperature=1.0)
        assert out[:, :WIDE].equal(PADDED["input_ids"]) and out[:, WIDE:].equal(made.tokens + FIRST)
        assert int(made.tokens.max()) < CODES
    with mmaccel.attach(denoiser, mmaccel.Stepwise()):
        assert denoiser.generate(torch.tensor([[0, 38]]), max_new_tokens=2).shape == (1, 4)


def test_one_negative_prompt_is_for_all_rows_and_scale_0_is_it_alone() -> None:
    target = TARGETS["llada"]()
    one, three = left_padded([[9, 2, 5]]), left_padded([[9, 2, 5]] * 3)
    with mmaccel.attach(target, mmaccel.Stepwise(), seed=7) as handle:
        made = [target.generate(**PADDED, **DRAWN, **negative(away)) for away in (one, three)]
        assert made[0].equal(made[1])
        others = left_padded(OTHERS)
        only = target.generate(**PADDED, **DRAWN, **negative(others, guidance_scale=0))
        assert handle.stats.branches == 2
        alone = target.generate(**others, **DRAWN)
        assert only[:, WIDE:].equal(alone[:, max(map(len, OTHERS)) :])


def test_a_canvas_is_refused_where_its_tokens_would_be_wrong() -> None:
    """In training mode, and where the branches' blocks begin elsewhere."""
    model = llada()
    model.dropout = torch.nn.Dropout(0.1).train()
    with pytest.raises(OptionError, match="expected evaluation mode"):
        mmaccel.attach(model, "stepwise")
    with mmaccel.attach(model.eval(), "stepwise"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2)
    target = TARGETS["sdar"]()
    for policy in (mmaccel.Stepwise(), mmaccel.LosslessUnmask(3, cache="block")):
        with mmaccel.attach(target, policy) as handle:
            with pytest.raises(OptionError, match="end alike in the model's blocks of 4"):
                target.generate(**PADDED, **DRAWN, **negative(left_padded(OTHERS)))
        assert handle.history == []
    with pytest.raises(OptionError, match="layout of 9|40 ids"):
        mmaccel.attach(llada(), "stepwise", layout=mmaccel.Grid(2, 3, vocab_size=9))


def test_positions_are_those_of_the_longest_prompt() -> None:
    model, away = llada(max_sequence_length=13), left_padded(OTHERS)
    with mmaccel.attach(model, mmaccel.Stepwise(), seed=7):
        for is_guided, positions in ((False, 3 * (WIDE + LENGTH)), (True, 6 * (7 + LENGTH))):
            made = []
            for sides in ((0, 0), *SIDES):
                before = model.tokens_processed
                more = negative(padded(away, sides)) if is_guided else {}
                out = model.generate(**padded(PADDED, sides), **DRAWN, **more)
                made.append(out[:, WIDE + sum(sides) :])
                assert model.tokens_processed - before == LENGTH * positions
            assert all(each.equal(made[0]) for each in made)


def test_tokens_keep_their_order_around_padding() -> None:
    """In long rows too, where an unstable sort shuffles equal keys."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 1000, (3, 300), generator=generator)
    mask = torch.rand(3, 300, generator=generator) < 0.5
    tokens, lengths = join_branches([(ids, mask)], torch.device("cpu"))
    for row in range(3):
        assert tokens[row, : lengths[row]].equal(ids[row][mask[row]])


def test_rows_end_at_end_tokens() -> None:
    model = TARGETS["llada"]()
    with mmaccel.attach(model, mmaccel.Stepwise(), seed=7) as handle:
        free = model.generate(**PADDED, max_new_tokens=LENGTH, do_sample=True)[:, WIDE:]
        end = int(free[0, 1])
        index = torch.arange(LENGTH)
        stops = torch.where(free == end, index + 1, LENGTH).amin(1)
        assert int(stops.min()) < int(stops.max()) or int(stops.max()) < LENGTH
        asked: dict[str, Any] = {"max_new_tokens": LENGTH, "do_sample": True}
        out = model.generate(**PADDED, **asked, eos_token_id=[end, 999], pad_token_id=2)
        wanted = torch.where(index < stops[:, None], free, 2)[:, : int(stops.max())]
        assert out[:, WIDE:].equal(wanted) and handle.stats.tokens == int(stops.sum())
        filled = torch.where(wanted == 2, end, wanted)
        assert model.generate(**PADDED, **asked, eos_token_id=end)[:, WIDE:].equal(filled)
        config = SimpleNamespace(eos_token_id=end, pad_token_id=2)
        assert model.generate(
            PADDED["input_ids"], config, attention_mask=PADDED["attention_mask"], **asked
        ).equal(out)
        model.generation_config = config
        assert model.generate(**PADDED, **asked).equal(out)
        assert model.generate(**PADDED, **asked, eos_token_id=-1)[:, WIDE:].equal(free)
        del model.generation_config
        model.config.eos_token_id, model.config.pad_token_id = end, 2
        assert model.generate(**PADDED, **asked).equal(out)
        only = model.generate(torch.tensor([[5]]), **asked, return_dict_in_generate=True)
        assert only.sequences.shape[1] <= 1 + LENGTH


def test_defaults_come_from_the_configuration_of_call_and_model() -> None:
    from transformers import GenerationConfig

    model = llada()
    with mmaccel.attach(model, mmaccel.Stepwise(), seed=2):

        def made(config: Any = None, **options: Any) -> list[int]:
            tokens: list[int] = model.generate(IDS, config, **options)[0, 5:].tolist()
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
        denoiser: Any = LLaDADenoiser(model, MASK)
        with mmaccel.attach(denoiser, mmaccel.Stepwise()) as other:
            denoiser.generate(IDS)
            assert "repetition_penalty 1.1" in other.stats.notes[0]


def test_models_are_found_by_their_configuration() -> None:
    found = mmaccel.supports(llada(mask_token_id=-1))
    assert not found and "0..39, received -1" in found.reason
    assert mmaccel.supports(build_lm("llama")).family == "causal_lm"
    for kind in ("LLaDA", "dream", ["llada"], None):
        assert find_denoiser(llada(model_type=kind)) is None
    known = mmaccel.supports(llada())
    assert known and "lossless-unmask" in known.policies and "jacobi" not in known.policies
    assert "revised-parallel" in known.policies
    sdar = TARGETS["sdar"]()
    assert "revised-parallel" in mmaccel.supports(sdar).policies
    assert mmaccel.supports(SDARDenoiser(sdar)).policies == mmaccel.supports(sdar).policies
    uniform = mmaccel.supports(MaskedLM(build_lm("llama").double(), None))
    assert uniform.family == "MaskedLM" and "revised-parallel" not in uniform.policies
    wrapper = SimpleNamespace(_orig_mod=sdar, device=sdar.device)  # as compiled
    with mmaccel.attach(wrapper, "stepwise"):
        assert sdar.generate(IDS, max_new_tokens=2).shape == (1, 7)


@pytest.mark.slow
def test_values_that_ask_for_nothing_change_nothing() -> None:
    model = llada()
    neutral = {name: row.neutral for name, row in DENOISER.items() if row.use == "refuse"}
    neutral |= {"temperature": 1.0}
    with mmaccel.attach(model, "stepwise", seed=3) as handle:
        plain = model.generate(**PADDED, **DRAWN)
        for name, value in neutral.items():
            assert model.generate(**PADDED, **DRAWN | {name: value}).equal(plain), name
        for name in ("num_beams", "num_return_sequences"):  # True is not 1, nor False 0.0
            with pytest.raises(OptionError, match=f"^{name}: "):
                model.generate(**PADDED, **DRAWN, **{name: True})
    assert len(handle.history) == 1 + len(neutral)


def test_generate_is_a_method_of_the_object_while_attached() -> None:
    target = TARGETS["dream"]()
    with mmaccel.attach(target, "entropy-bounded"):
        out = target.generate(torch.tensor([[5, 6]]), max_new_tokens=2)
        assert out.shape == (1, 4) and target.generate.__name__ == "generate"
        assert list(inspect.signature(target.generate).parameters)[:3] == FIRST_ARGUMENTS
        assert target.diffusion_generate(torch.tensor([[5, 6]]), max_new_tokens=2).equal(out)
    assert not hasattr(target, "generate") and target.diffusion_generate() == "its own"


def test_interrupts_bring_the_canvas_and_calls_do_not_nest() -> None:
    class Hooked(TinyLLaDA):
        """Calls a function before its n-th pass from now on."""

        left, then = 10**6, staticmethod(lambda: None)

        def forward(self, *args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                self.then()
            return super().forward(*args, **options)

    def interrupt() -> None:
        raise KeyboardInterrupt

    model: Any = Hooked(VOCAB, model_type="llada", mask_token_id=MASK)
    with mmaccel.attach(model, mmaccel.Stepwise()):
        model.left, model.then = 2, interrupt
        with pytest.raises(CanvasInterrupt) as stop:
            model.generate(torch.tensor([[PAD, 5]]), max_new_tokens=LENGTH)
        assert int(stop.value.is_committed.sum()) == 2
        model.left, model.then = 0, lambda: model.generate(IDS, max_new_tokens=2)
        with pytest.raises(BusyError):
            model.generate(IDS, max_new_tokens=2)
        model.left = LENGTH
        assert model.generate(torch.tensor([[5]]), max_new_tokens=2).shape == (1, 3)
