"""Guidance of a denoiser's `generate`: the prompts to lead away from are a second branch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import OptionError, ShapeError
from tests.diffusion_lm.test_attach import LENGTH, MASK, PADDED, TARGETS, WIDE, right_padded
from tests.diffusion_lm.test_denoisers import images
from tests.fixtures.canvas import PROMPTS, run
from tests.fixtures.tiny_lms import left_padded

ALIKE = [[9, 2, 5, 1, 1, 4, 7], [13, 3, 9, 9, 2], [5]]  # end alike in blocks of 4
AWAY = left_padded(ALIKE)
SCALE = 1.7  # of `run`
TEXTS = ["llada", "dream", "sdar", "fast-dllm", "masked-lm", "denoiser"]
POLICIES = [mmaccel.Stepwise(), mmaccel.LosslessUnmask(3), mmaccel.EntropyBounded(0.4)]


def guided(away: dict[str, Tensor] = AWAY, **options: Any) -> dict[str, Any]:
    """What a call is given."""
    return {
        "max_new_tokens": LENGTH,
        "temperature": 1.0,
        "guidance_scale": SCALE,
        "negative_prompt_ids": away["input_ids"],
        "negative_prompt_attention_mask": away["attention_mask"],
    } | options


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("name", TEXTS)
def test_tokens_are_those_of_two_branches(name: str, policy: Any) -> None:
    from mmaccel.pipelines.diffusion_lm.registry import open_denoiser

    target = TARGETS[name]()
    wanted = run(policy, open_denoiser(target), LENGTH, 1.0, guided=True, others=ALIKE).tokens
    with mmaccel.attach(target, policy, seed=7) as handle:
        for inputs, away in ((PADDED, AWAY), (right_padded(PROMPTS), right_padded(ALIKE))):
            out = target.generate(**inputs, **guided(away))
            assert out[:, :WIDE].equal(inputs["input_ids"]) and out[:, WIDE:].equal(wanted)
        assert handle.stats.branches == 2
        plain = target.generate(**PADDED, max_new_tokens=LENGTH, temperature=1.0)[:, WIDE:]
        same = target.generate(**PADDED, max_new_tokens=LENGTH, temperature=1.0, guidance_scale=1)
    assert not plain.equal(wanted) and same[:, WIDE:].equal(plain)


@pytest.mark.parametrize("family", ["mmada", "lumina"])
def test_images_are_guided(family: str) -> None:
    """As MMaDA and Lumina-DiMOO are used; scale 1 + w is their w."""
    denoiser = images(family)
    rows = [[[int(denoiser.to_canvas(torch.tensor(i))) for i in row] for row in side]
            for side in (PROMPTS, ALIKE)]  # fmt: skip
    made = run(mmaccel.Stepwise(), denoiser, 4, 1.0, True, prompts=rows[0], others=rows[1])
    with mmaccel.attach(denoiser, mmaccel.Stepwise(), seed=7):
        out = denoiser.generate(**PADDED, **guided(max_new_tokens=4))
    assert out[:, WIDE:].equal(denoiser.to_model(made.tokens))


def test_one_negative_prompt_is_for_all() -> None:
    target = TARGETS["llada"]()
    one = left_padded([[9, 2, 5]])
    three = left_padded([[9, 2, 5]] * 3)
    with mmaccel.attach(target, mmaccel.Stepwise(), seed=7):
        made = [target.generate(**PADDED, **guided(away)) for away in (one, three)]
        greedy = [
            target.generate(**PADDED, **guided(one, guidance_scale=s, do_sample=False))
            for s in (1.5, 9.0)
        ]
    assert made[0].equal(made[1]) and not greedy[0].equal(greedy[1])


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"negative_prompt_ids": None}, OptionError, "expected negative_prompt_ids beside it"),
        ({"guidance_scale": None}, OptionError, "guidance_scale other than 1 beside it"),
        ({"guidance_scale": 1.0}, OptionError, "guidance_scale other than 1 beside it"),
        ({"guidance_scale": float("nan")}, OptionError, "guidance_scale"),
        ({"guidance_scale": "3"}, OptionError, "guidance_scale"),
        ({"negative_prompt_ids": torch.ones(3)}, ShapeError, "negative_prompt_ids: expected int64"),
        ({"negative_prompt_attention_mask": torch.ones(3, 2)}, ShapeError, "negative_prompt_att"),
        ({"negative_prompt_ids": torch.full((3, 7), MASK)}, OptionError, "no mask token"),
    ],
)
def test_bad_guidance_is_refused(options: Any, kind: type[Exception], words: str) -> None:
    target = TARGETS["llada"]()
    with mmaccel.attach(target, mmaccel.Stepwise()) as handle:
        with pytest.raises(kind, match=words):
            target.generate(**PADDED, **guided(**options))
        two = {name: value[:2] for name, value in AWAY.items()}
        with pytest.raises(ShapeError, match="expected 3 rows or one for all, received 2"):
            target.generate(**PADDED, **guided(two))
        assert handle.history == []


def test_prompts_that_end_elsewhere_in_a_block_are_refused() -> None:
    target = TARGETS["sdar"]()
    other = left_padded([[9, 2], [1, 2], [3, 4]])
    with mmaccel.attach(target, mmaccel.Stepwise()):
        with pytest.raises(OptionError, match="end alike in the model's blocks of 4"):
            target.generate(**PADDED, **guided(other))
