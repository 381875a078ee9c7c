"""Which visual tokens a call kept: after the encoder, inside the model, after both."""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import mmaccel
from mmaccel import ILRe, RandomTokens
from mmaccel.reduction.visual_tokens.context import VisualContext
from mmaccel.reduction.visual_tokens.contract import Stage, TokenReducer
from tests.fixtures.lanes import mostly_slow
from tests.fixtures.tiny_lms import act_at
from tests.fixtures.tiny_vlms import CONFIGS, IMAGE, build_vlm, draw_prompts, shared_vlm
from tests.vision_language.runs import reduces

pytestmark = reduces


@dataclass(frozen=True)
class EvenTokens(TokenReducer):
    """Keeps every second token, then the others."""

    def score(self, context: VisualContext) -> Tensor:
        index = torch.arange(context.x.shape[1]).expand(len(context.x), -1)
        return -(index % 2).float()


@dataclass(frozen=True)
class LastTokens(TokenReducer):
    """Keeps a row's last tokens in front of layer 2."""

    stage: ClassVar[Stage] = "llm_layer"

    def layers_in(self, depth: int) -> tuple[int, ...]:
        return (2,)

    def score(self, context: VisualContext) -> Tensor:
        return torch.arange(context.x.shape[1]).expand(len(context.x), -1).float()


def run(name: str, methods: Any, per_row: Any = (2, 0, 1)) -> tuple[Any, Any, Any]:
    model = shared_vlm(name)
    inputs = draw_prompts(name, model, per_row)
    with mmaccel.attach(model, "jacobi", strict=True, seed=1, visual_tokens=methods) as handle:
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
    return model, inputs, handle


@pytest.mark.parametrize("method", [RandomTokens(keep=0.5), ILRe(keep=0.4)], ids=repr)
@pytest.mark.parametrize("name", mostly_slow(CONFIGS, "llava_next", "qwen3_vl", "idefics3"))
def test_kept_tokens_are_the_columns_that_stay(name: str, method: Any, stays: list[Tensor]) -> None:
    _, inputs, handle = run(name, method)
    found = handle.kept_tokens
    for row, ids in enumerate(inputs["input_ids"]):
        own = [each.kept for each in found if each.row == row]
        wanted = stays[0][row][ids == IMAGE]
        assert torch.equal(torch.cat(own) if own else wanted[:0], wanted)
    assert 0 < sum(each.counts[1] for each in found) < sum(each.counts[0] for each in found)
    assert all(len(each.places.row) == len(each.kept) for each in found)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_both_stages_together(name: str) -> None:
    """Even tokens leave the encoder; of these a row's last ones stay."""
    _, _, handle = run(name, [LastTokens(keep=0.25), EvenTokens(keep=0.5)])
    for row in (0, 2):
        own = [each for each in handle.kept_tokens if each.row == row]
        even = torch.cat([torch.arange(len(each.kept)) % 2 == 0 for each in own])
        stays = torch.cat([each.kept for each in own]).nonzero().flatten()
        n = len(stays)
        assert torch.equal(stays, even.nonzero().flatten()[-n:])
        assert n == max(1, round(0.25 * int(even.sum())))


def test_keeping_all_keeps_all_and_other_calls_have_nothing_to_say() -> None:
    model, inputs, handle = run("llava", RandomTokens(keep=1.0))
    assert all(bool(each.kept.all()) for each in handle.kept_tokens)
    assert len(handle.kept_tokens) == 3 and handle.stats.exactness == "bitwise"
    text = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3).long()}
    with mmaccel.attach(model, "jacobi", visual_tokens=RandomTokens(keep=0.5)) as run_:
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
        assert run_.kept_tokens
        model.generate(**text, max_new_tokens=2, do_sample=False)
        assert run_.kept_tokens == []
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
        with pytest.warns(UserWarning, match="beam"):
            model.generate(**inputs, max_new_tokens=2, num_beams=2, do_sample=False)
        assert run_.kept_tokens == []
    with mmaccel.attach(model, "jacobi") as plain:
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert plain.kept_tokens == []


def test_no_pixels_and_features_are_held() -> None:
    model = build_vlm("llava_next")
    inputs = draw_prompts("llava_next", model, (2, 0, 1))
    held = [StorageWeakRef(inputs["pixel_values"].untyped_storage())]
    model.base_model.multi_modal_projector.register_forward_hook(
        lambda _module, _given, made: held.append(StorageWeakRef(made.untyped_storage()))
    )
    with mmaccel.attach(model, "jacobi", visual_tokens=RandomTokens(keep=0.5)) as handle:
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
        del inputs
        gc.collect()
        assert len(held) == 2 and all(storage.expired() for storage in held)
        assert len(handle.kept_tokens) == 3


def test_a_call_inside_a_call_leaves_the_outer_ones_tokens() -> None:
    model = shared_vlm("llava")
    methods = [LastTokens(keep=0.25), EvenTokens(keep=0.5)]
    outer, inner = (draw_prompts("llava", model, rows) for rows in ((2, 0, 1), (1,)))
    options: dict[str, Any] = dict(max_new_tokens=5, do_sample=False)
    with mmaccel.attach(model, "jacobi", strict=True, visual_tokens=methods) as handle:
        alone = model.generate(**outer, **options)
        kept, reference = handle.kept_tokens, handle.stats.reference
        act = act_at(1, lambda: model.generate(**inner, **options))
        made = model.generate(**outer, **options, stopping_criteria=[act])
        assert torch.equal(made, alone) and handle.stats.reference == reference
        assert [k.kept.tolist() for k in handle.kept_tokens] == [k.kept.tolist() for k in kept]
        assert handle.history[1].reference != reference


def test_a_callers_loop_may_sample_twice() -> None:
    model = shared_vlm("llava")
    inputs = draw_prompts("llava", model, (2, 0, 1))

    def twice(model: Any, ids: Tensor, **given: Any) -> Tensor:
        made = [model._sample(ids, **given) for _ in range(2)]
        assert torch.equal(made[0], made[1])
        return made[1]

    with mmaccel.attach(model, "jacobi", visual_tokens=EvenTokens(keep=0.5)) as handle:
        model.generate(**inputs, max_new_tokens=3, do_sample=False, custom_generate=twice)
        first, second = handle.history
        assert "24 of 48 visual tokens" in first.reference
        assert first.reference == second.reference and len(handle.kept_tokens) == 3


def test_calls_of_two_threads_run_one_after_the_other() -> None:
    """A reducer works in the model's layers, which the threads share."""
    model = shared_vlm("llava")
    prompts = [draw_prompts("llava", model, rows) for rows in ((2, 0, 1), (1,))]
    options: dict[str, Any] = dict(max_new_tokens=5, do_sample=False)
    with mmaccel.attach(model, "jacobi", strict=True, visual_tokens=LastTokens(keep=0.25)) as run:
        alone = [model.generate(**inputs, **options) for inputs in prompts]
        made: dict[int, Tensor] = {}

        def generate(index: int, **more: Any) -> None:
            made[index] = model.generate(**prompts[index], **options, **more)

        other = threading.Thread(target=generate, args=(1,))

        def act() -> None:
            other.start()
            other.join(0.3)
            assert other.is_alive() and 1 not in made  # it waits

        generate(0, stopping_criteria=[act_at(1, act)])
        other.join(60)
        assert all(torch.equal(made[k], alone[k]) for k in (0, 1))
        assert len(run.history) == 4 and len(run.kept_tokens) == 1
