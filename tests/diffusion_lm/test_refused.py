"""What `attach` refuses of denoisers, their models and policies; wrapped and busy models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import BusyError, OptionError, UnsupportedModelError
from mmaccel.pipelines.diffusion_lm.masked_lm import MaskedLM
from mmaccel.pipelines.diffusion_lm.models import LLaDADenoiser, SDARDenoiser
from mmaccel.pipelines.diffusion_lm.registry import find_denoiser
from tests.fixtures.canvas import PROMPTS
from tests.fixtures.denoisers import DreamBed, LLaDABed, LuminaBed
from tests.fixtures.sdar import SDARBed
from tests.fixtures.tiny_lms import build_lm

VOCAB, MASK = 40, 39
IDS = torch.tensor([PROMPTS[2]])


def llada(**config: Any) -> Any:
    """A bed that names itself."""
    return LLaDABed(VOCAB, **({"model_type": "llada", "mask_token_id": MASK} | config))


def test_models_are_told_by_their_configuration_and_tried() -> None:
    wild = llada()
    wild.dropout = torch.nn.Dropout(0.1).train()
    same = vars(llada().config)
    for model, match in (
        (SDARBed(VOCAB, model_type="sdar"), "give the denoiser the tokenizer's"),
        (llada(mask_token_id=None), "0..39, received 126336"),  # the published one
        (llada(mask_token_id=-1), "0..39, received -1"),
        (wild, "expected evaluation mode"),
        (LuminaBed(VOCAB, **same), "a TypeError"),  # other code under the same name
        (DreamBed(VOCAB, **same), "a TypeError"),
    ):
        with pytest.raises((OptionError, UnsupportedModelError), match=match):
            mmaccel.attach(model, mmaccel.EntropyBounded())
        found = mmaccel.supports(model)
        assert not found and match in found.reason and not hasattr(model, "generate")
    assert mmaccel.supports(build_lm("llama")).family == "causal_lm"
    for kind in ("LLaDA", "dream", ["llada"], None):
        assert find_denoiser(llada(model_type=kind)) is None
    known = mmaccel.supports(llada())
    assert known and "lossless-unmask" in known.policies and "jacobi" not in known.policies
    assert "revised-parallel" not in known.policies  # it checks by entries of one row
    sdar = SDARBed(VOCAB, model_type="sdar", mask_token_id=MASK, block_size=4)
    assert "revised-parallel" in mmaccel.supports(sdar).policies
    assert mmaccel.supports(SDARDenoiser(sdar)).policies == mmaccel.supports(sdar).policies
    uniform = mmaccel.supports(MaskedLM(build_lm("llama").double(), None))
    assert uniform.family == "MaskedLM" and "revised-parallel" not in uniform.policies


def test_policies_that_cannot_fill_its_canvases_are_refused() -> None:
    blocks = MaskedLM(build_lm("qwen3").double(), MASK, block=4)
    for target, policy, match in (
        (llada(), "revised-parallel", "can be kept"),
        (llada(), mmaccel.Stepwise(cache="prefix"), "can be kept"),
        (LLaDADenoiser(llada()), mmaccel.Stepwise(cache="block"), "can be kept"),
        (llada(), mmaccel.AdaptiveBlock(delimiters=(VOCAB,)), "expected ids below 40"),
        (blocks, mmaccel.AdaptiveBlock(delimiters=(5,)), "attends to everything"),
        (blocks, mmaccel.Stepwise(block=3), "divides the model's blocks of 4"),
        (MaskedLM(build_lm("llama").double(), None), "revised-parallel", "uniform corruption"),
    ):
        with pytest.raises((OptionError, UnsupportedModelError), match=match):
            mmaccel.attach(target, policy)
    for name in mmaccel.supports(blocks).policies:
        with mmaccel.attach(blocks, name):
            assert blocks.generate(IDS, max_new_tokens=3).shape == (1, 8)  # type: ignore[attr-defined]


def test_what_cannot_be_attached_is_refused() -> None:
    model = llada()
    for policy, options, match in (
        (mmaccel.Jacobi(), {}, "offers for a canvas"),
        ("jacobi", {}, "offers for a canvas"),
        ("entropy", {}, "expected one of"),
        (mmaccel.EntropyBounded, {}, "make an instance"),
        ("cached-blocks", {}, "LLaDA2Pipeline's"),
        ("stepwise", {"cuda_graphs": True}, "not captured"),
        ("stepwise", {"seed": "one"}, "seed"),
        ("stepwise", {"layout": 3}, "layout"),
        ("stepwise", {"layout": mmaccel.Grid(2, 3, vocab_size=9)}, "40 ids"),
    ):
        with pytest.raises(OptionError, match=match):
            mmaccel.attach(model, policy, **options)  # type: ignore[arg-type]
        assert not hasattr(model, "generate")
    forced = mmaccel.Grid(2, 3, vocab_size=VOCAB)
    with mmaccel.attach(model, "stepwise", layout=forced):
        assert model.generate(IDS, max_new_tokens=6).shape == (1, 11)


def test_one_call_at_a_time() -> None:
    class Again(LLaDABed):
        inner: Any = None

        def forward(self, *args: Any, **options: Any) -> Any:
            if self.inner is not None:
                self.inner()
            return super().forward(*args, **options)

    model: Any = Again(VOCAB, model_type="llada", mask_token_id=MASK)
    with mmaccel.attach(model, "stepwise"):
        model.inner = lambda: model.generate(IDS, max_new_tokens=2)
        with pytest.raises(BusyError):
            model.generate(IDS, max_new_tokens=2)
        model.inner = None
        assert model.generate(IDS, max_new_tokens=2).shape == (1, 7)


def test_wrapped_models_are_looked_into() -> None:
    model = llada()
    wrapper = SimpleNamespace(_orig_mod=model, device=model.device)
    assert mmaccel.supports(wrapper)
    with mmaccel.attach(wrapper, "stepwise"):
        made: Tensor = model.generate(IDS, max_new_tokens=2)
        assert made.shape == (1, 7)
