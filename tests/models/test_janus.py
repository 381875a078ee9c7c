"""Janus under a policy: its own image loop, guidance and all, and its text mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.pipelines.hosts.transformers_release import CACHE
from tests.fixtures.tiny_lms import falls_back
from tests.fixtures.windows import build_janus, janus_prompts

ROWS = [[20, 21], [22, 23, 24, 25, 26], [27], [28, 29, 30]]
IMAGE: dict[str, Any] = dict(generation_mode="image", guidance_scale=3.0, do_sample=False)


def own(model: Any, rows: Any = ROWS, **options: Any) -> Any:
    """The library's own loop; with a cache given, as 5.17 cannot prepare the one it wants."""
    from transformers import DynamicCache

    inputs = janus_prompts(rows)
    return model.generate(**inputs, **(IMAGE | options), **{CACHE: DynamicCache()})


def run(
    model: Any, policy: Any, rows: Any = ROWS, seed: Any = 3, strict: bool = True, **options: Any
) -> tuple[Any, mmaccel.Stats]:
    with mmaccel.attach(model, policy, seed=seed, strict=strict) as handle:
        out = model.generate(**janus_prompts(rows), **(IMAGE | options))
    assert handle.stats is not None
    return out, handle.stats


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"no_repeat_ngram_size": 40}, "guidance that does not come first"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({}, "a cache given by the caller"),
    ],
)
def test_what_only_the_original_can_serve(options: dict[str, Any], reason: str) -> None:
    from transformers import DynamicCache

    model = build_janus()
    plain = own(model, **options)
    with pytest.warns(UserWarning, match=reason):
        ours, stats = run(model, "jacobi", strict=False, **options, **{CACHE: DynamicCache()})
    assert torch.equal(getattr(ours, "sequences", ours), getattr(plain, "sequences", plain))
    assert reason in "; ".join(stats.fallbacks)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1]])}, "more than hide padding"),
        ({"position_ids": torch.tensor([[0, 3, 7, 9, 11, 20]])}, "position_ids"),
    ],
)
def test_odd_calls_run_the_original(options: dict[str, Any], reason: str) -> None:
    import transformers as hf

    model, inputs = build_janus(), {"input_ids": torch.tensor([[1, 20, 21, 22, 23, 7]])}
    inputs |= {"attention_mask": torch.ones(1, 6).long()} | options
    plain = model.generate(**inputs, **IMAGE, **{CACHE: hf.DynamicCache()})
    with falls_back(model, reason):
        ours = model.generate(**inputs, **IMAGE, **{CACHE: hf.DynamicCache()})
    assert torch.equal(ours, plain)


def test_processors_of_the_callers_run_the_original_once() -> None:
    import transformers as hf

    class Prefix(hf.LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores.roll(input_ids.shape[1], -1)

    model, guidance = build_janus(), hf.ClassifierFreeGuidanceLogitsProcessor(3.0)
    for own_list, scale, reason in (
        ([Prefix()], 3.0, "guidance that does not come first"),
        ([guidance, Prefix()], 1.0, "a Prefix, to which Janus passes the prompt alone"),
    ):
        images = []
        for attached in (False, True):
            given = hf.LogitsProcessorList(own_list)
            options = IMAGE | {"guidance_scale": scale, "logits_processor": given}
            options |= {CACHE: hf.DynamicCache()}
            if not attached:
                images.append(model.generate(**janus_prompts(ROWS), **options))
                continue
            with falls_back(model, reason):
                images.append(model.generate(**janus_prompts(ROWS), **options))
            assert len(given) == 2  # the library put its guidance there once, or found one
        assert torch.equal(*images)


def test_training_with_dropout_and_refused_models_run_the_original(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_janus()
    with mmaccel.attach(model, "jacobi", strict=True):
        model.model.language_model.layers[0].add_module("drop", torch.nn.Dropout(0.1))
        model.train()
        with pytest.raises(mmaccel.AttachError, match="training mode with dropout"):
            model.generate(**janus_prompts(ROWS), **IMAGE)
        model.eval()

        def refuse(*_: Any) -> None:
            raise mmaccel.UnsupportedModelError("no such model")

        monkeypatch.setattr("mmaccel.pipelines.models.janus.Janus.check", refuse)
        with pytest.raises(mmaccel.AttachError, match="no such model"):
            model.generate(**janus_prompts(ROWS), **IMAGE)


def test_the_models_own_attributes_are_restored() -> None:
    model = build_janus()
    mine = model._get_logits_processor
    model._get_logits_processor = mine
    run(model, "jacobi")
    assert vars(model)["_get_logits_processor"] is mine


def test_a_wrapped_answer_keeps_its_shape() -> None:
    model = build_janus()
    ours, _ = run(model, "jacobi", return_dict_in_generate=True)
    assert torch.equal(ours.sequences, run(model, "jacobi")[0])
