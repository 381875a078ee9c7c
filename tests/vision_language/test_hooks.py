"""The hooks of a call: none is left behind, and none is on another model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.pipelines.hosts.vision_language import encoder
from mmaccel.pipelines.hosts.vision_language.towers import find_tower
from tests.fixtures.tiny_lms import act_at
from tests.fixtures.tiny_vlms import build_vlm, draw_prompts
from tests.vision_language.runs import GREEDY, answer, build_looking, reduces, shared_looking

pytestmark = reduces

METHODS = [
    mmaccel.DownsamplePixels(keep=0.25), mmaccel.PixelPrune(keep=0.5), mmaccel.ToMe(keep=0.4),
    mmaccel.VisionZip(keep=0.4), mmaccel.FastV(keep=0.4), mmaccel.ILRe(keep=0.4),
    mmaccel.LazyLLM(keep=0.3, layers=(1, 2)),
]  # fmt: skip


def count_hooks(model: Any) -> list[int]:
    """Of each module; some are transformers' own."""
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


class EndedError(Exception):
    """Ends a call."""


def end() -> None:
    raise EndedError


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_nothing_is_left_behind(method: Any) -> None:
    """By calls that end, and by one that ends in an error, under attention that takes no bias."""
    model = shared_looking("llava")
    inputs = draw_prompts("llava", model)
    own = model.generate(**inputs, **GREEDY)
    before = count_hooks(model)
    config = find_tower(model).config
    if method.stage == "encoder_layer":
        config._attn_implementation = "flash_attention_2"
    answer(model, method, inputs)
    with pytest.raises(EndedError):
        answer(model, method, inputs, stopping_criteria=[act_at(2, end)])
    assert config._attn_implementation == (
        "flash_attention_2" if "ToMe" in repr(method) else "sdpa"
    )
    config._attn_implementation = "sdpa"
    assert count_hooks(model) == before and torch.equal(model.generate(**inputs, **GREEDY), own)


def test_two_models_of_one_class_have_hooks_of_their_own() -> None:
    """Each under a method: a call inside a call of the other one."""
    models = [build_looking("llava"), build_vlm("llava", seed=1)]
    methods = [mmaccel.ToMe(keep=0.4, layers=(1,)), mmaccel.DownsamplePixels(keep=0.25)]
    inputs = [draw_prompts("llava", model) for model in models]
    alone = [answer(*call)[0] for call in zip(models, methods, inputs)]
    before, made = list(map(count_hooks, models)), []
    with (
        mmaccel.attach(models[0], "autoregressive", seed=5, visual_tokens=methods[0]),
        mmaccel.attach(models[1], "autoregressive", seed=5, visual_tokens=methods[1]),
    ):
        act = act_at(1, lambda: made.append(models[1].generate(**inputs[1], **GREEDY)))
        made.append(models[0].generate(**inputs[0], **GREEDY, stopping_criteria=[act]))
    assert torch.equal(made[0], alone[1]) and torch.equal(made[1], alone[0])
    assert list(map(count_hooks, models)) == before


def test_hooks_that_cannot_all_be_made_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_looking("llava")
    inputs = draw_prompts("llava", model)
    before = count_hooks(model)
    attention = encoder.find_attentions(find_tower(model))[1]
    monkeypatch.setattr(attention, "register_forward_pre_hook", lambda *_, **__: end())
    with pytest.raises(EndedError):
        answer(model, mmaccel.ToMe(keep=0.4), inputs)
    assert count_hooks(model) == before


@pytest.mark.slow
@pytest.mark.parametrize("method", [mmaccel.ToMe(keep=0.4), mmaccel.VisionZip(keep=0.4)], ids=repr)
def test_a_tower_that_was_compiled_without_the_hooks_is_refused(method: Any) -> None:
    model = build_looking("llava")
    inputs = draw_prompts("llava", model)
    find_tower(model).compile(backend="eager")
    model.generate(**inputs, **GREEDY)
    with pytest.raises(mmaccel.UnsupportedModelError, match="compiled without them"):
        answer(model, method, inputs)
    torch._dynamo.reset()
    assert len(answer(model, method, inputs))
