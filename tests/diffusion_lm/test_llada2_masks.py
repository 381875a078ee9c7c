"""LLaDA2's masks and KV cache: declared readings of masks, their self-check, and single passes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.diffusion_lm.llada2.block_masks import (
    BLOCK_MASKS,
    READINGS,
    BlockMasks,
    find_masks,
)
from mmaccel.pipelines.hosts.diffusion_lm.llada2.service import LLaDA2Denoiser, LLaDA2Service
from mmaccel.pipelines.hosts.diffusion_lm.self_check import find_fault
from mmaccel.pipelines.hosts.layers.masks import MASK_FORMS
from mmaccel.samplers.canvas.stepwise import Stepwise
from tests.fixtures.llada2 import build_model, build_pipe

POLICIES = ["cached-blocks", Stepwise(cache="block")]
OPTIONS: dict[str, Any] = {"prompt": ["hello there", "abc"], "gen_length": 16}


def run(pipe: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: torch.Tensor = pipe(**OPTIONS, generator=torch.Generator().manual_seed(1)).sequences
    return made


def check(model: Any, reading: str, form: str, is_padded: bool, block: int = 8) -> str:
    """Why nothing can be cached of the pipeline's own call under a declaration."""
    pipe = build_pipe(model.reading, block)
    pipe.register_modules(model=model)
    BLOCK_MASKS[type(model).__name__], before = BlockMasks(reading, form), find_masks(model)
    try:
        service = LLaDA2Service(pipe)
        service.strict = False
        return service._check_call(block, is_padded)
    finally:
        BLOCK_MASKS[type(model).__name__] = before


def check_mask(model: Any, form: str, block: int) -> str | None:
    return find_fault(LLaDA2Denoiser(model, 0, block, form))


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("model", ["blocks", "causal", "full"])
def test_only_the_right_declaration_passes(model: str, is_padded: bool) -> None:
    inner = build_model(model, dtype=torch.bfloat16)
    passed = [
        (reading, form)
        for reading in READINGS
        for form in MASK_FORMS
        if not check(inner, reading, form, is_padded)
    ]
    assert passed == ([] if model == "full" else [(model, "zero-one")])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_only_the_right_form_of_a_block_mask_passes(dtype: torch.dtype) -> None:
    model = build_model("refused", dtype=dtype)
    for block in (1, 2, 8):
        reasons = {form: check_mask(model, form, block) for form in MASK_FORMS}
        assert [form for form in MASK_FORMS if not reasons[form]] == ["zero-one"]


def test_a_model_that_reads_half_a_block_more_is_found() -> None:
    model = build_model("blocks", 12)
    assert "do not give the logits" in check(model, "blocks", "zero-one", False)
    assert check(model, "blocks", "zero-one", False, 12) == ""


def test_a_model_that_ignores_its_cache_is_found() -> None:
    """Its calls without a cache are right under every mask."""
    model = build_model("blocks")
    forward = model.forward

    def forget(*args: Any, past_key_values: Any = None, **inputs: Any) -> Any:
        if past_key_values is not None and inputs["input_ids"].shape[1] in (5, 16):
            inputs["attention_mask"] = inputs["attention_mask"].clone()
            inputs["attention_mask"][..., :8] = 0
        return forward(*args, past_key_values=past_key_values, **inputs)

    model.forward = forget
    assert "over cached blocks" in check(model, "blocks", "zero-one", False)
    assert "from cached keys" in (check_mask(model, "zero-one", 8) or "")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "wrong", [BlockMasks("causal", "zero-one"), BlockMasks("blocks", "additive")]
)
def test_under_a_wrong_declaration_the_original_runs(
    policy: Any, wrong: BlockMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_wrong = wrong.form == "additive" or policy == "cached-blocks"
    monkeypatch.setitem(BLOCK_MASKS, "BlocksLLaDA2", wrong)
    plain = run(build_pipe("blocks"))
    pipe = build_pipe("blocks")
    with mmaccel.attach(pipe, policy) as handle:
        made = run(pipe)
    assert handle.stats is not None and bool(handle.stats.fallbacks) == is_wrong
    assert not is_wrong or torch.equal(made, plain)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_undeclared_class_runs_the_original_with_a_remedy(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(BLOCK_MASKS, "BlocksLLaDA2")
    plain = run(build_pipe("blocks"))
    pipe = build_pipe("blocks")
    with mmaccel.attach(pipe, policy) as handle:
        assert torch.equal(run(pipe), plain)
    reason = "nobody has declared how a BlocksLLaDA2 reads masks; see BLOCK_MASKS"
    assert handle.stats is not None and reason in handle.stats.fallbacks[0]
    with mmaccel.attach(pipe, policy, strict=True):
        with pytest.raises(UnsupportedModelError, match=reason):
            run(pipe)
