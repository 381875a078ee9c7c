"""Image families of transformers under a policy: the library's own tokens and distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.pipelines.hosts.transformers_release import CACHE
from tests.fixtures.tiny_lms import PassCounter, falls_back
from tests.fixtures.windows import (
    FAMILIES,
    LENGTHS,
    build_janus,
    build_model,
    janus_prompts,
    prompts,
)

NAMES = list(FAMILIES)
WITH_JANUS = [*NAMES, "janus"]  # whose images are made by a loop of its own
ROWS = [[26, 27, 28, 29], [30, 31], [33, 32, 31, 30, 29, 28], [39, 38, 37]]


def build(name: str) -> Any:
    return build_janus() if name == "janus" else build_model(name)


def call(name: str, model: Any, rows: Any, **options: Any) -> Tensor:
    """New tokens of `generate`; greedy unless said otherwise."""
    if name == "janus":
        own = {"generation_mode": "image", "guidance_scale": 3.0, "do_sample": False}
        return model.generate(**janus_prompts(rows), **(own | options))
    inputs = prompts(name, rows)
    options = {"max_new_tokens": LENGTHS[name], "do_sample": False, **options}
    return model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]


def generate(
    name: str, model: Any, policy: Any, seed: Any = 3, rows: Any = ROWS, **options: Any
) -> tuple[Tensor, mmaccel.Stats]:
    """New tokens under a policy, strictly."""
    with mmaccel.attach(model, policy, seed=seed, strict=True) as run:
        made = call(name, model, rows, **options)
    assert run.stats is not None and run.stats.fallbacks == []
    return made, run.stats


def own(name: str, model: Any, rows: Any = ROWS, **options: Any) -> Tensor:
    """New tokens of the library's own loop; Janus gets the cache that 5.17 cannot prepare."""
    from transformers import DynamicCache

    given = {CACHE: DynamicCache()} if name == "janus" else {}
    return call(name, model, rows, **given, **options)


@pytest.mark.parametrize("name", WITH_JANUS)
def test_greedy_is_the_librarys_own(name: str) -> None:
    model = build(name)
    assert mmaccel.supports(model).family == FAMILIES.get(name, name)
    with PassCounter(model) as counter:
        plain = own(name, model)
    assert len(set(plain.flatten().tolist())) > 5
    most = 17 if name == "janus" else counter.passes + 1  # its own loop calls parts of the model
    for policy in (mmaccel.Jacobi(window=6), mmaccel.Jacobi(window=50)):
        ours, stats = generate(name, model, policy)
        assert torch.equal(ours, plain), policy
        assert stats.passes + stats.prefill_passes <= most
    assert torch.equal(own(name, model), plain)
    assert not {"_get_logits_processor", "prepare_inputs_for_generation"} & set(vars(model))


def test_glm_image_leaves_the_models_own_state_alone() -> None:
    model = build_model("glm_image")
    own("glm_image", model)
    before = model.model._cached_decode_position_ids.clone(), model.model._prefill_len
    generate("glm_image", model, mmaccel.Jacobi(window=6), rows=[ROWS[1]])
    assert torch.equal(model.model._cached_decode_position_ids, before[0])
    assert model.model._prefill_len == before[1]


def test_glm_image_without_grids_or_with_guidance_runs_the_original() -> None:
    model = build_model("glm_image")
    inputs = prompts("glm_image", ROWS[:1])
    ids = {k: v for k, v in inputs.items() if k in ("input_ids", "attention_mask")}
    none = inputs | {
        "image_grid_thw": torch.zeros(0, 3).long(),
        "images_per_sample": torch.tensor([0]),
    }
    for given, options, reason in (
        (ids, {}, "a call without image_grid_thw"),
        (none, {}, "a call without image_grid_thw"),
        (inputs, {"guidance_scale": 2.0}, "guidance for a model whose positions"),
    ):
        with falls_back(model, reason):
            model.generate(**given, max_new_tokens=4, do_sample=False, **options)
