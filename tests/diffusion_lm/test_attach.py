"""`attach` to denoisers and to models that are served through one: what `generate` makes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.canvas_contracts import CanvasInterrupt
from mmaccel.errors import AttachError
from mmaccel.pipelines.diffusion_lm.masked_lm import MaskedLM
from mmaccel.pipelines.diffusion_lm.models import LLaDADenoiser
from mmaccel.pipelines.diffusion_lm.registry import open_denoiser
from tests.fixtures.canvas import PROMPTS, run
from tests.fixtures.denoisers import DreamBed, FastDLLMBed, LLaDABed
from tests.fixtures.sdar import SDARBed
from tests.fixtures.tiny_lms import PAD, build_lm, left_padded

VOCAB, MASK, LENGTH = 40, 39, 6
WIDE = max(map(len, PROMPTS))
PADDED = left_padded(PROMPTS)
FAST = "Fast_dLLM_Qwen"
FIRST_ARGUMENTS = ["inputs", "generation_config", "input_ids"]
ENDLESS = {"eos_token_id": None, "pad_token_id": None}


class Dream(DreamBed):
    """With its published method's name."""

    def diffusion_generate(self, inputs: Any = None, **options: Any) -> str:
        return "its own"


TARGETS: dict[str, Callable[[], Any]] = {
    "llada": lambda: LLaDABed(VOCAB, model_type="llada", mask_token_id=MASK),
    "mmada": lambda: LLaDABed(VOCAB, model_type="mmada", mask_token_id=MASK),
    "dream": lambda: Dream(VOCAB, model_type="Dream", mask_token_id=MASK),
    "sdar": lambda: SDARBed(VOCAB, model_type="sdar", mask_token_id=MASK, block_size=4),
    "fast-dllm": lambda: FastDLLMBed(VOCAB, model_type=FAST, mask_token_id=MASK, bd_size=4),
    "denoiser": lambda: LLaDADenoiser(LLaDABed(VOCAB), MASK),
    "masked-lm": lambda: MaskedLM(build_lm("qwen3", **ENDLESS).double(), MASK, shift=1, block=4),
}  # fmt: skip


def right_padded(rows: list[list[int]]) -> dict[str, Tensor]:
    """Padding behind the prompts."""
    flipped = left_padded([row[::-1] for row in rows])
    return {name: value.flip(1) for name, value in flipped.items()}


@pytest.mark.parametrize("name", TARGETS)
def test_tokens_are_those_of_the_policy_called_by_hand(name: str) -> None:
    target = TARGETS[name]()
    for temperature, policy in (
        (0.0, mmaccel.EntropyBounded(gamma=0.4)),
        (1.0, mmaccel.EntropyBounded(gamma=0.4)),
        (1.0, mmaccel.Stepwise()),
        (1.0, mmaccel.LosslessUnmask(drafts=4)),
    ):
        oracle = policy if isinstance(policy, mmaccel.EntropyBounded) else mmaccel.Stepwise()
        made = run(oracle, open_denoiser(target), LENGTH, temperature)
        with mmaccel.attach(target, policy, seed=7) as handle:
            for inputs in (PADDED, right_padded(PROMPTS)):
                options = {"max_new_tokens": LENGTH, "temperature": temperature}
                out = target.generate(**inputs, **options)
                assert out.dtype == torch.int64 and out[:, :WIDE].equal(inputs["input_ids"])
                assert out[:, WIDE:].equal(made.tokens)
            assert len(handle.history) == 2 and handle.stats is handle.history[-1]
            assert handle.stats.tokens == 3 * LENGTH and 0 < handle.stats.passes <= LENGTH
            assert handle.stats.policy == repr(policy)
    assert mmaccel.supports(target).family == type(open_denoiser(target)).__name__


@pytest.mark.parametrize("name", ["llada", "dream", "sdar", "fast-dllm", "masked-lm"])
def test_a_row_does_not_depend_on_its_batch(name: str) -> None:
    target = TARGETS[name]()
    options: dict[str, Any] = {"max_new_tokens": LENGTH, "temperature": 1.0}
    with mmaccel.attach(target, mmaccel.Stepwise(), seed=[4, 5, 6]):
        whole = target.generate(**PADDED, **options)
    for row, prompt in enumerate(PROMPTS):
        with mmaccel.attach(target, mmaccel.Stepwise(), seed=4 + row):
            alone = target.generate(torch.tensor([prompt]), **options)
        assert alone[0, len(prompt) :].equal(whole[row, WIDE:])


def test_rows_end_at_end_tokens() -> None:
    model = TARGETS["llada"]()
    with mmaccel.attach(model, mmaccel.Stepwise(), seed=7) as handle:
        free = model.generate(**PADDED, max_new_tokens=LENGTH, do_sample=True)[:, WIDE:]
        end = int(free[0, 1])  # elsewhere than in the middle it proves less
        index = torch.arange(LENGTH)
        stops = torch.where(free == end, index + 1, LENGTH).amin(1)
        assert int(stops.min()) < int(stops.max()) or int(stops.max()) < LENGTH
        asked: dict[str, Any] = {"max_new_tokens": LENGTH, "do_sample": True}
        given = {"eos_token_id": [end, 999], "pad_token_id": 2}
        out = model.generate(**PADDED, **asked, **given)
        wanted = torch.where(index < stops[:, None], free, 2)[:, : int(stops.max())]
        assert out[:, WIDE:].equal(wanted) and handle.stats.tokens == int(stops.sum())
        filled = torch.where(wanted == 2, end, wanted)
        assert model.generate(**PADDED, **asked, eos_token_id=end)[:, WIDE:].equal(filled)
        config = SimpleNamespace(eos_token_id=end, pad_token_id=2)
        assert model.generate(PADDED["input_ids"], config, attention_mask=PADDED["attention_mask"],
                              **asked).equal(out)  # fmt: skip
        model.generation_config = config
        assert model.generate(**PADDED, **asked).equal(out)
        assert model.generate(**PADDED, **asked, eos_token_id=-1)[:, WIDE:].equal(free)
        del model.generation_config
        model.config.eos_token_id, model.config.pad_token_id = end, 2
        assert model.generate(**PADDED, **asked).equal(out)
        only = model.generate(torch.tensor([[5]]), **asked, return_dict_in_generate=True)
        assert only.sequences.shape[1] <= 1 + LENGTH


def test_images_come_in_the_models_ids() -> None:
    first, codes = 26, 8
    denoiser = LLaDADenoiser(LLaDABed(VOCAB), MASK, images=(first, codes))
    shifted = [[int(denoiser.to_canvas(torch.tensor(i))) for i in row] for row in PROMPTS]
    wanted = run(mmaccel.Stepwise(), denoiser, 4, prompts=shifted).tokens + first
    with mmaccel.attach(denoiser, mmaccel.Stepwise(), seed=7):
        out = denoiser.generate(**PADDED, max_new_tokens=4, temperature=1.0)  # type: ignore[attr-defined]
    assert out[:, :WIDE].equal(PADDED["input_ids"]) and out[:, WIDE:].equal(wanted)


def test_detach_gives_back_what_was_there() -> None:
    for name in ("dream", "denoiser"):
        target = TARGETS[name]()
        kind, before = type(target), set(vars(target))
        handle = mmaccel.attach(target, "entropy-bounded")
        with pytest.raises(AttachError, match="has one"):
            mmaccel.attach(target, "stepwise")
        out = target.generate(torch.tensor([[5, 6]]), max_new_tokens=2)
        assert out.shape == (1, 4) and type(target) is not kind
        assert list(inspect.signature(target.generate).parameters)[:3] == FIRST_ARGUMENTS
        assert target.generate.__name__ == "generate" and type(copy.copy(target)) is kind
        if name == "dream":
            assert target.diffusion_generate(torch.tensor([[5, 6]]), max_new_tokens=2).equal(out)
        handle.detach()
        assert type(target) is kind and not hasattr(target, "generate")
        assert set(vars(target)) == before
    assert TARGETS["dream"]().diffusion_generate() == "its own"


def test_an_interrupt_brings_what_was_committed() -> None:
    class Stopped(LLaDABed):
        left = 10**6

        def forward(self, *args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return super().forward(*args, **options)

    model = Stopped(VOCAB, model_type="llada", mask_token_id=MASK)
    with mmaccel.attach(model, mmaccel.Stepwise()):
        model.left = 2
        with pytest.raises(CanvasInterrupt) as stop:
            model.generate(torch.tensor([[PAD, 5]]), max_new_tokens=LENGTH)  # type: ignore[operator]
        assert int(stop.value.is_committed.sum()) == 2
        model.left = LENGTH
        assert model.generate(torch.tensor([[5]]), max_new_tokens=2).shape == (1, 3)  # type: ignore[operator]
