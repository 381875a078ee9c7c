"""Models as people load them: quantised, from GGUF files, with adapters of peft."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.causal_lm.quantization import find_activations
from mmaccel.samplers.compare_logits import compare_logits
from tests.fixtures.lanes import mostly_slow
from tests.fixtures.their_weights import (
    LENGTH,
    PROMPTS,
    WIDE,
    build_torch_ao,
    build_torchao,
    check_own_tokens,
    decode,
    load_bitsandbytes,
    load_compressed,
    load_torchao,
    plant,
    write_gguf,
)
from tests.fixtures.tiny_lms import build_lm, falls_back

pytestmark = pytest.mark.filterwarnings("ignore")  # of the quantisers
GREEDY: dict[str, Any] = PROMPTS | LENGTH | {"do_sample": False}
_WEIGHT_ONLY = "Int8WeightOnlyConfig"
_DYNAMIC = "Int8DynamicActivationInt8WeightConfig"


def build(name: str, folder: Path) -> Any:
    """A quantised model by name."""
    if name == "torch.ao":
        return build_torch_ao()
    if name.startswith("compressed"):
        return load_compressed(folder, name.removeprefix("compressed-tensors per "))
    if name.startswith("bitsandbytes"):
        options: dict[str, Any] = {f"load_in_{name.split()[1]}bit": True}
        if "without" in name:
            options["llm_int8_threshold"] = 0.0
        return load_bitsandbytes(folder, **options)
    return build_torchao(_DYNAMIC, per_tensor=name == "torchao per tensor")


def test_weight_only_int8_of_torchao_stays_bitwise(tmp_path: Path) -> None:
    for model in (build_torchao(_WEIGHT_ONLY), load_torchao(_WEIGHT_ONLY, tmp_path)):
        assert find_activations(model) is None
        assert check_own_tokens(model).dtype == "float32"


@pytest.mark.slow  # tests/released has a real one
def test_gguf_stays_bitwise(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "Q4_0")
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = dict(gguf_file="model.gguf", dtype=torch.float32)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    assert find_activations(model) is None  # the loader dequantises
    assert not model.lm_head.weight.equal(build_lm("qwen2", **WIDE).lm_head.weight)
    check_own_tokens(model)


@pytest.mark.parametrize(
    ("name", "exactness", "dtype"),
    mostly_slow(
        [
            ("torchao per token", "up to rounding", "int8"),
            ("torchao per tensor", "relaxed", "int8"),
            ("bitsandbytes 8", "relaxed", "int8"),
            ("bitsandbytes 8 without outliers", "up to rounding", "int8"),
            ("bitsandbytes 4", "up to rounding", "bfloat16"),
            ("compressed-tensors per token", "up to rounding", "int8"),
            ("compressed-tensors per tensor", "relaxed", "int8"),
            ("torch.ao", "relaxed", "int8"),
        ],
        ("torchao per tensor", "relaxed", "int8"),
    ),
)
def test_quantised_activations_are_served_and_say_what_is_left(
    tmp_path: Path, name: str, exactness: str, dtype: str
) -> None:
    model = build(name, tmp_path)
    assert mmaccel.supports(model)
    for policy in (mmaccel.Jacobi(8), mmaccel.Autoregressive()):
        _, stats = decode(model, policy, do_sample=True)
        assert (stats.exactness, stats.dtype) == (exactness, dtype)
        assert any("share its rounding" in note for note in stats.notes) == (exactness == "relaxed")
    _, stats = decode(model, mmaccel.SpeculativeJacobi(8), do_sample=True)
    assert stats.exactness == ("relaxed" if exactness == "relaxed" else "distribution")


def test_a_model_far_from_itself_in_other_shapes_is_served(monkeypatch: Any) -> None:
    """Its windows are compared with its own passes of the same shapes, and a wrong one is seen."""
    ids = torch.randint(4, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    model = build_torch_ao(outlier=16.0)
    with torch.no_grad():
        whole, part = (model(i, use_cache=False).logits[:, :3] for i in (ids, ids[:, :3]))
    assert compare_logits(whole, part).mean > 0.1
    assert mmaccel.supports(model)
    plant(monkeypatch, _one_key_too_many)
    assert not mmaccel.supports(build_torch_ao(outlier=16.0))


def _one_key_too_many(positions: Tensor, mask: Tensor) -> Tensor:
    keys = torch.arange(mask.shape[-1])
    return mask.masked_fill(keys == positions[:, None, :, None] + 1, 0.0)


def _one_key_too_few(positions: Tensor, mask: Tensor) -> Tensor:
    keys = torch.arange(mask.shape[-1])
    return mask.masked_fill((keys == 0) & (positions[:, None, :, None] > 0), -torch.inf)


@pytest.mark.parametrize("change", [_one_key_too_many, _one_key_too_few])
@pytest.mark.parametrize(
    "name", mostly_slow(["torchao per tensor", "bitsandbytes 8"], "torchao per tensor")
)
def test_a_wrong_mask_is_told_from_rounding(
    tmp_path: Path, monkeypatch: Any, name: str, change: Any
) -> None:
    model = build(name, tmp_path)
    plant(monkeypatch, change)
    support = mmaccel.supports(model)
    assert not support and "more than int8 activations of" in support.reason
    with pytest.raises(UnsupportedModelError, match="standard deviations off"):
        mmaccel.attach(model, "jacobi", strict=True)
    with falls_back(model, re.escape(support.reason)):
        made = model.generate(**GREEDY)
    assert made.equal(model.generate(**GREEDY))


def test_the_self_check_runs_once() -> None:
    for config, expected in ((_WEIGHT_ONLY, 3), (_DYNAMIC, 4)):
        model, calls = build_torchao(config), list[None]()
        model.register_forward_pre_hook(lambda *_, calls=calls: calls.append(None))
        for _ in range(2):
            assert mmaccel.supports(model) and len(calls) == expected


def test_an_unknown_quantiser_promises_nothing_bitwise() -> None:
    model = build_lm("llama")
    model.config.quantization_config = {"quant_method": "fp8"}
    assert decode(model, "jacobi", do_sample=False)[1].exactness == "up to rounding"
    model.config.quantization_config = {"quant_method": "gptq"}
    assert decode(model, "jacobi", do_sample=False)[1].exactness == "bitwise"


def _with_adapter(**options: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, init_lora_weights=False, **options)  # random: it changes tokens
    torch.manual_seed(11)
    return peft.get_peft_model(build_lm("llama"), config, adapter_name="own").eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(target_modules=["q_proj", "lm_head"]),
        dict(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
    ],
    ids=["head", "saved head"],
)
def test_adapters_of_peft(options: dict[str, Any]) -> None:
    wrapped = _with_adapter(**options)
    check_own_tokens(wrapped)
    own = wrapped.generate(**GREEDY)
    plain = build_lm("llama").generate(**GREEDY)
    assert not own.equal(plain)
    merged = wrapped.merge_and_unload()
    check_own_tokens(merged)
    assert merged.generate(**GREEDY).equal(own)


def test_an_adapter_is_switched_off_merged_and_on_under_a_policy() -> None:
    wrapped = _with_adapter(target_modules=["q_proj", "lm_head"])
    own = wrapped.generate(**GREEDY)
    plain = build_lm("llama").generate(**GREEDY)
    with mmaccel.attach(wrapped, mmaccel.Jacobi(8), strict=True) as run:
        assert wrapped.generate(**GREEDY).equal(own)
        with wrapped.disable_adapter():
            assert wrapped.generate(**GREEDY).equal(plain)
        wrapped.merge_adapter()
        assert wrapped.generate(**GREEDY).equal(own)
        wrapped.unmerge_adapter()
        assert wrapped.generate(**GREEDY).equal(own)
    assert len(run.history) == 4 and all(stats.passes < 14 for stats in run.history)


def test_prompts_that_peft_learned_run_the_original() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    wrapped = peft.get_peft_model(build_lm("llama"), config).eval()
    plain = wrapped.generate(**GREEDY)
    with falls_back(wrapped, "another"):
        assert wrapped.generate(**GREEDY).equal(plain)
