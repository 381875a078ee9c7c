"""What is refused, what is left behind, and interrupts: policies on DiffusionGemma."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.canvas_contracts import CanvasInterrupt
from mmaccel.errors import (
    AttachError,
    BusyError,
    NumericsError,
    OptionError,
    UnsupportedModelError,
)
from tests.fixtures.diffusion_gemma import CANVAS, VOCAB, build_model

IDS = torch.arange(3, 17).view(2, 7)


def test_a_canvas_to_begin_with_runs_the_original() -> None:
    model = build_model()
    begun: dict[str, Any] = {"max_new_tokens": 8, "decoder_input_ids": torch.full((2, CANVAS), 5)}
    torch.manual_seed(1)
    plain = model.generate(IDS, **begun).sequences
    with mmaccel.attach(model, mmaccel.EntropyBounded(), seed=1) as handle:
        torch.manual_seed(1)
        with pytest.warns(UserWarning, match="decoder_input_ids"):
            assert model.generate(IDS, **begun).sequences.equal(plain)
        assert "decoder_input_ids" in handle.stats.fallbacks[0] and handle.stats.passes == 48
    for options in ({"strict": True}, {"layout": mmaccel.Grid(2, 4, vocab_size=VOCAB)}):
        with mmaccel.attach(model, mmaccel.EntropyBounded(), **options):  # type: ignore[arg-type]
            with pytest.raises(UnsupportedModelError, match="decoder_input_ids"):
                model.generate(IDS, **begun)


def test_detach_leaves_nothing_behind() -> None:
    model = build_model()
    kind, before = type(model), dict(vars(model))
    torch.manual_seed(1)
    plain = model.generate(IDS, max_new_tokens=8, return_dict_in_generate=False)
    handle = mmaccel.attach(model, mmaccel.EntropyBounded())
    with pytest.raises(AttachError, match="has one"):
        mmaccel.attach(model, mmaccel.Stepwise())
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(model.generate(IDS, max_new_tokens=8, return_dict_in_generate=False))
    assert made[0].equal(made[1]) and not made[0].equal(made[2])
    assert type(copy.copy(model)) is kind
    handle.detach()
    assert type(model) is kind and dict(vars(model)) == before
    torch.manual_seed(1)
    assert model.generate(IDS, max_new_tokens=8, return_dict_in_generate=False).equal(plain)


def test_what_cannot_be_is_refused() -> None:
    model = build_model()
    for policy, match in (
        (mmaccel.LosslessUnmask(), "carries the logits"),
        (mmaccel.Stepwise(cache="prefix"), "encoder keeps"),
        (mmaccel.CachedBlocks(), "LLaDA2Pipeline's"),
        (mmaccel.Jacobi(), "offers for a canvas"),
        (mmaccel.EntropyBounded, "make an instance"),
        ("cached-block", "expected one of"),
    ):
        with pytest.raises(OptionError, match=match):
            mmaccel.attach(model, policy)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="41 ids"):
        mmaccel.attach(model, "stepwise", layout=mmaccel.Grid(2, 4, vocab_size=9))
    with mmaccel.attach(model, "stepwise", seed=[1]), pytest.raises(OptionError, match="seed"):
        model.generate(IDS)
    with mmaccel.attach(model, mmaccel.RevisedParallel()), pytest.raises(OptionError):
        model.generate(IDS)
    with mmaccel.attach(model, mmaccel.Stepwise(block=3)), pytest.raises(OptionError):
        model.generate(IDS)
    known = mmaccel.supports(model)
    assert known and "entropy-bounded" in known.policies
    assert "lossless-unmask" not in known.policies and "jacobi" not in known.policies
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    with mmaccel.attach(model, "stepwise", seed=1), pytest.raises(NumericsError):
        model.generate(IDS)


class Stop:
    """A logits processor that does something at its n-th call."""

    def __init__(self, n: int, then: Any) -> None:
        self.left, self.then = n, then

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if not self.left:
            self.then()
        return scores


def test_interrupts_bring_what_was_made_and_calls_do_not_nest() -> None:
    from transformers import LogitsProcessorList

    model = build_model()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with mmaccel.attach(model, "stepwise", seed=4, strict=True) as handle:
        free = model.generate(IDS, max_new_tokens=16).sequences[:, 7:]
        processors = LogitsProcessorList([Stop(CANVAS + 4, interrupt)])
        with pytest.raises(CanvasInterrupt) as found:
            model.generate(IDS, max_new_tokens=16, logits_processor=processors)
        committed, made = found.value.is_committed, found.value.generation
        assert committed.sum(1).tolist() == [11, 11] and committed[:, :CANVAS].all()
        assert made.tokens[committed].equal(free[committed]) and made.stats.passes == 11
        processors = LogitsProcessorList([Stop(2, lambda: model.generate(IDS))])
        with pytest.raises(BusyError, match="one call at a time"):
            model.generate(IDS, max_new_tokens=16, logits_processor=processors)
        assert model.generate(IDS, max_new_tokens=16).sequences[:, 7:].equal(free)
        assert len(handle.history) == 2
