"""Prompts of a denoiser's `generate`: padding that is cut, and what is no prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import mmaccel
from mmaccel.errors import OptionError, ShapeError
from mmaccel.pipelines.diffusion_lm.call import Rows
from mmaccel.pipelines.diffusion_lm.models import LLaDADenoiser
from mmaccel.samplers.canvas.cache_plan import CachePlan
from tests.diffusion_lm.test_attach import LENGTH, MASK, PADDED, TARGETS, VOCAB, WIDE
from tests.fixtures.canvas import PROMPTS, run
from tests.fixtures.denoisers import LLaDABed
from tests.fixtures.tiny_lms import left_padded

AWAY = [[9, 2, 5], [13, 3, 9, 9, 2, 1, 7], [5]]
SIDES = ((7, 0), (0, 7), (3, 4))
NOBODY = -100  # some code's padding


def padded(inputs: dict[str, Tensor], sides: tuple[int, int]) -> dict[str, Tensor]:
    """More columns on both sides, which are padding in every row."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    wide = torch.where(pad(mask, sides) == 0, NOBODY, pad(ids, sides))
    return {"input_ids": wide, "attention_mask": pad(mask, sides)}


_OWN = {"input_ids": "prompt_ids", "attention_mask": "prompt_attention_mask"}


def away(inputs: dict[str, Tensor], **options: Any) -> dict[str, Any]:
    """Prompts to lead away from, as a call has them."""
    asked: dict[str, Any] = {"guidance_scale": 1.7}
    return asked | {f"negative_{_OWN[name]}": value for name, value in inputs.items()} | options


@pytest.mark.parametrize("name", ["llada", "dream", "sdar", "fast-dllm", "masked-lm", "denoiser"])
def test_columns_that_are_padding_in_every_row_change_nothing(name: str) -> None:
    target = TARGETS[name]()
    asked: dict[str, Any] = {"max_new_tokens": LENGTH, "temperature": 1.0}
    with mmaccel.attach(target, mmaccel.LosslessUnmask(3), seed=7) as handle:
        plain = target.generate(**PADDED, **asked)[:, WIDE:]
        passes = handle.stats.passes
        for sides in SIDES:
            inputs = padded(PADDED, sides)
            out = target.generate(**inputs, **asked)
            assert out[:, : WIDE + 7].equal(inputs["input_ids"])
            assert out[:, WIDE + 7 :].equal(plain) and handle.stats.passes == passes


def test_positions_are_those_of_the_longest_prompt() -> None:
    model: Any = LLaDABed(VOCAB, model_type="llada", mask_token_id=MASK, max_sequence_length=13)
    asked: dict[str, Any] = {"max_new_tokens": LENGTH, "temperature": 1.0}
    negative = left_padded(AWAY)
    with mmaccel.attach(model, mmaccel.Stepwise(), seed=7):
        for is_guided, positions in ((False, 3 * (WIDE + LENGTH)), (True, 6 * (7 + LENGTH))):
            made = []
            for sides in ((0, 0), *SIDES):
                before, more = (
                    model.tokens_processed,
                    away(padded(negative, sides)) if is_guided else {},
                )
                out = model.generate(**padded(PADDED, sides), **asked, **more)
                made.append(out[:, WIDE + sum(sides) :])
                assert model.tokens_processed - before == LENGTH * positions
            assert all(each.equal(made[0]) for each in made)
        with pytest.raises(OptionError, match="at most 13 positions"):
            model.generate(torch.ones(1, 8, dtype=torch.int64), **asked)


def test_tokens_keep_their_order_around_padding() -> None:
    """In long rows too, where sorting shuffles what is alike."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 1000, (3, 300), generator=generator)
    mask = torch.rand(3, 300, generator=generator) < 0.5
    tokens, lengths = Rows(ids, mask).packed(torch.device("cpu"))
    for row in range(3):
        assert tokens[row, : lengths[row]].equal(ids[row][mask[row]])


def test_one_negative_prompt_may_be_wider_than_the_prompts() -> None:
    target = TARGETS["llada"]()
    long = [9, 2, 5, 1, 1, 4, 7, 30]
    made = run(
        mmaccel.Stepwise(), LLaDADenoiser(target, MASK), LENGTH, 1.0, True, others=[long] * 3
    )
    asked: dict[str, Any] = {"max_new_tokens": LENGTH, "temperature": 1.0}
    with mmaccel.attach(target, mmaccel.Stepwise(), seed=7):
        out = target.generate(**PADDED, **asked, **away({"input_ids": torch.tensor([long])}))
    assert out[:, WIDE:].equal(made.tokens)


def test_scale_0_is_the_negative_prompts_alone() -> None:
    target = TARGETS["llada"]()
    negative = left_padded(AWAY)
    asked: dict[str, Any] = {"max_new_tokens": LENGTH, "temperature": 1.0}
    with mmaccel.attach(target, mmaccel.Stepwise(), seed=7) as handle:
        out = target.generate(**PADDED, **asked, **away(negative, guidance_scale=0))
        assert handle.stats.branches == 2
        alone = target.generate(**negative, **asked)
        assert out[:, WIDE:].equal(alone[:, max(map(len, AWAY)) :])
        assert not out.equal(target.generate(**PADDED, **asked))
        with pytest.raises(OptionError, match="received 0 alone"):
            target.generate(**PADDED, **asked, guidance_scale=0)


@pytest.mark.parametrize("far", [0, 1])
def test_what_is_not_looked_at_is_not_asked_for(far: int) -> None:
    """Rows end in sight where others do not; without later blocks a block model does the same."""
    target, plan = TARGETS["fast-dllm"](), CachePlan("none", far=far)
    asked: dict[str, Any] = {"max_new_tokens": 8, "temperature": 1.0}
    made = []
    for policy in (mmaccel.Stepwise(), mmaccel.Stepwise(cache=plan)):
        with mmaccel.attach(target, policy, seed=7):
            made.append(target.generate(**PADDED, **asked))
    assert made[0].equal(made[1])


ROWS = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 1]])}
ONE = {"input_ids": torch.tensor([[5, 6, 7]])}
INF = float("inf")


def spoiled(value: int) -> Tensor:
    """Two rows with an id in the second one that is none."""
    return torch.tensor([[5, 6, 7], [8, value, 1]])


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"input_ids": spoiled(MASK)}, OptionError, "input_ids: .*no mask token.* in row 1"),
        ({"input_ids": spoiled(-2)}, OptionError, "input_ids: .*from 0 on.* id -2 in row 1"),
        ({"input_ids": spoiled(VOCAB)}, OptionError, "input_ids: .*below 40.* id 40 in row 1"),
        (ONE | away({"input_ids": torch.tensor([[MASK]])}), OptionError,
         "negative_prompt_ids: .*no mask token.* in row 0"),
        (away({"input_ids": spoiled(-1)}), OptionError, "negative_prompt_ids: .*id -1 in row 1"),
        (away({"input_ids": spoiled(99)}), OptionError, "negative_prompt_ids: .*id 99 in row 1"),
        (away({"input_ids": spoiled(200).to(torch.uint8)}), OptionError, "id 200 in row 1"),
        ({"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, ShapeError,
         "input_ids: .*at least one token.* row 1 by attention_mask"),
        (away(ROWS | {"attention_mask": torch.tensor([[0, 0, 0], [1, 0, 0]])}), ShapeError,
         "negative_prompt_ids: .*at least one token.* row 0 by negative_prompt_attention_mask"),
        ({"attention_mask": torch.tensor([[-INF, 0, 0], [0, 0, 0]])}, OptionError,
         "attention_mask: expected 1 on tokens and 0 on padding, received -inf"),
        ({"attention_mask": torch.tensor([[1, float("nan"), 1]] * 2)}, OptionError, "received nan"),
        (away(ROWS | {"attention_mask": torch.full((2, 3), 2)}), OptionError,
         "negative_prompt_attention_mask: .*received 2"),
        ({"negative_prompt_attention_mask": torch.ones(2, 3)}, OptionError,
         "expected negative_prompt_ids beside it"),
        ({"generation_config": {"max_new_tokens": 3}}, OptionError,
         "expected a GenerationConfig, received a dict"),
        ({"generation_config": torch.ones(2, 3)}, OptionError, "received a Tensor"),
        ({"eos_token_id": MASK}, OptionError, "eos_token_id: .*received 39, the mask token"),
        ({"eos_token_id": [3, MASK]}, OptionError, "eos_token_id: .*received 39, the mask token"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused_before_a_pass(
    options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    model = TARGETS["llada"]()
    with mmaccel.attach(model, mmaccel.Stepwise()) as handle:
        before = model.calls
        with pytest.raises(kind, match=words):
            model.generate(**(ROWS | {"max_new_tokens": 2} | options))
        assert model.calls == before and handle.history == []


def test_masks_are_booleans_or_numbers_and_padding_is_any() -> None:
    model = TARGETS["llada"]()
    ids = torch.tensor([[MASK, 5, 6], [VOCAB, -1, 7]])
    mask = torch.tensor([[0, 1, 1], [0, 0, 1]])
    with mmaccel.attach(model, mmaccel.Stepwise(), seed=7):
        made = [
            model.generate(ids, attention_mask=mask.to(kind), max_new_tokens=3)
            for kind in (torch.int64, torch.bool, torch.float32, torch.uint8)
        ]
    assert all(each.equal(made[0]) for each in made) and made[0][:, :3].equal(ids)
    Rows(torch.tensor([[5, 200]], dtype=torch.uint8)).check(256, 261)  # which wraps round to 5


def test_prompts_of_images_are_in_the_models_ids() -> None:
    denoiser: Any = LLaDADenoiser(LLaDABed(VOCAB), MASK, images=(26, 8))
    with mmaccel.attach(denoiser, mmaccel.Stepwise()):
        assert denoiser.generate(torch.tensor([[0, 38]]), max_new_tokens=2).shape == (1, 4)
        for ids, options in (([[5, MASK]], {}), ([[5, 40]], {}), ([[5]], {"eos_token_id": MASK})):
            with pytest.raises(OptionError, match="id 39 in row 0|below 40|the mask token"):
                denoiser.generate(torch.tensor(ids), max_new_tokens=2, **options)


def test_a_self_check_at_attach_keeps_no_gradients() -> None:
    class Unchecked:
        is_self_checked = False

        def __init__(self, inner: Any) -> None:
            self.inner, self.had = inner, []  # type: ignore[var-annotated]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def forward(self, entries: Any) -> Tensor:
            self.had.append(torch.is_grad_enabled())
            logits: Tensor = self.inner.forward(entries)
            return logits

    denoiser: Any = Unchecked(TARGETS["masked-lm"]())
    with mmaccel.attach(denoiser, mmaccel.Stepwise(cache="block")):
        assert denoiser.had == [False] * 3 and torch.is_grad_enabled()
        assert denoiser.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=2).shape == (1, 5)
