"""How a model class reads masks is declared, and a wrong declaration is found before it is used."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.diffusion_lm.llada2.block_masks import (
    BLOCK_MASKS,
    FORMS,
    READINGS,
    BlockMasks,
    find_masks,
)
from mmaccel.pipelines.diffusion_lm.llada2.kv_cache import CachedModel
from mmaccel.pipelines.diffusion_lm.llada2.self_check import check_block_mask, check_call
from mmaccel.samplers.canvas.stepwise import Stepwise
from tests.fixtures.llada2 import build_model, build_pipe

POLICIES = ["cached-blocks", mmaccel.CachedBlocks(mask="blocks"), Stepwise(cache="block")]
OPTIONS: dict[str, Any] = {"prompt": ["hello there", "abc"], "gen_length": 16}


def run(pipe: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: torch.Tensor = pipe(**OPTIONS, generator=torch.Generator().manual_seed(1)).sequences
    return made


def check(model: Any, reading: str, form: str, is_padded: bool, block: int = 8) -> str:
    calls = CachedModel(model, model, form)

    def call(ids: Any, visible: Any, positions: Any) -> torch.Tensor:
        logits: torch.Tensor = model(ids, attention_mask=visible, position_ids=positions).logits
        return logits

    return check_call(calls, reading, block, is_padded, call)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("model", ["blocks", "causal", "full"])
def test_only_the_right_declaration_passes(model: str, is_padded: bool, dtype: torch.dtype) -> None:
    inner = build_model(model, dtype=dtype)
    passed = [
        (reading, form)
        for reading in READINGS
        for form in FORMS
        if not check(inner, reading, form, is_padded)
    ]
    assert passed == ([] if model == "full" else [(model, "zero-one")])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_only_the_right_form_of_a_block_mask_passes(dtype: torch.dtype) -> None:
    model = build_model("refused", dtype=dtype)
    for block in (1, 2, 8):
        reasons = {form: check_block_mask(CachedModel(model, model, form), block) for form in FORMS}
        assert [form for form in FORMS if not reasons[form]] == ["zero-one"]
        assert f"blocks of {block} of form 'additive'" in reasons["additive"]


def test_a_model_that_reads_half_a_block_more_is_found() -> None:
    model = build_model("blocks", 12)
    assert "do not give the logits" in check(model, "blocks", "zero-one", False)
    assert check(model, "blocks", "zero-one", False, 12) == ""


def test_a_model_that_drops_what_is_cached_is_found() -> None:
    """Its calls without a cache are right, whatever the mask says."""
    model = build_model("blocks")
    forward = model.forward

    def forget(*args: Any, past_key_values: Any = None, **inputs: Any) -> Any:
        if past_key_values is not None and args[0].shape[1] == 16:
            inputs["attention_mask"] = inputs["attention_mask"].clone()
            inputs["attention_mask"][..., :8] = 0
        return forward(*args, past_key_values=past_key_values, **inputs)

    model.forward = forget
    assert "over cached blocks" in check(model, "blocks", "zero-one", False)
    assert "over cached blocks" in check_block_mask(CachedModel(model, model, "zero-one"), 8)


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
def test_an_undeclared_class_runs_the_original_and_is_told_how_to_declare(
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


def test_declarations_go_by_the_class() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    assert find_masks(build_model("blocks")) == BlockMasks("blocks", "zero-one")
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9
    )  # fmt: skip
    assert find_masks(LlamaForCausalLM(config)) == BlockMasks("causal", "additive")
    assert find_masks(torch.nn.Linear(1, 1)) is None
    for wrong in ({"reading": "full"}, {"reading": "causal", "form": "float"}):
        with pytest.raises(OptionError, match="declare what the model's forward does"):
            BlockMasks(**wrong)
