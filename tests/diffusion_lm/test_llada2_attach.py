"""`attach` on a `LLaDA2Pipeline`: what changes, what does not, and what bad input gets."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.canvas_contracts import CanvasInterrupt
from mmaccel.catalog import policy_names
from mmaccel.errors import AttachError, BusyError, NumericsError, OptionError
from mmaccel.samplers.canvas.stepwise import Stepwise
from tests.fixtures.llada2 import MASK, build_pipe

OPTIONS: dict[str, Any] = {"prompt": "hello", "gen_length": 16, "num_inference_steps": 4}
POLICIES = ["cached-blocks", Stepwise(cache="block")]


def photograph(thing: Any) -> Any:
    """Class and attributes, by identity but for plain values."""
    return type(thing), {
        name: value if isinstance(value, (bool, int, float, str, type(None))) else id(value)
        for name, value in vars(thing).items()
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_left_behind(policy: Any) -> None:
    pipe = build_pipe("blocks")
    pipe(**OPTIONS)
    parts = (pipe, pipe.model, pipe.scheduler, pipe.tokenizer, *pipe.model.modules())
    weights = {name: value.clone() for name, value in pipe.model.state_dict().items()}
    before = [photograph(part) for part in parts if part is not pipe.scheduler]
    signature = inspect.signature(pipe.__call__)
    with mmaccel.attach(pipe, policy) as handle:
        assert inspect.signature(pipe.__call__) == signature
        assert type(pipe).__name__ == "LLaDA2Pipeline" and isinstance(pipe, type(pipe))
        pipe(**OPTIONS)
        with pytest.raises(ZeroDivisionError):
            pipe(**OPTIONS, callback_on_step_end=lambda *_: 1 / 0)
        with pytest.raises(AttachError, match="detach it first"):
            mmaccel.attach(pipe, "cached-blocks")
        with pytest.raises(AttachError, match="detach it first"):
            mmaccel.attach(pipe.model, mmaccel.Jacobi())
        pipe(**OPTIONS)
        assert len(handle.history) == 2
    assert [photograph(part) for part in parts if part is not pipe.scheduler] == before
    assert all(torch.equal(weights[name], v) for name, v in pipe.model.state_dict().items())
    with pytest.raises(ZeroDivisionError), mmaccel.attach(pipe, policy):
        raise ZeroDivisionError
    assert [photograph(part) for part in parts if part is not pipe.scheduler] == before


def test_the_model_itself_is_not_served_outside_the_pipelines_calls() -> None:
    pipe = build_pipe("full")
    ids = torch.arange(12)[None] % 5 + 4
    inputs = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(12)[None]}
    own = pipe.model(ids, **inputs).logits
    with mmaccel.attach(pipe, mmaccel.CachedBlocks("blocks")) as handle:
        assert torch.equal(pipe.model(ids, **inputs).logits, own)
        pipe(**OPTIONS)
        assert torch.equal(pipe.model(ids, **inputs).logits, own)
    assert len(handle.history) == 1


def test_a_refused_attach_leaves_the_model_alone() -> None:
    pipe, fresh = build_pipe("blocks"), build_pipe("blocks").model
    with mmaccel.attach(pipe, "cached-blocks"):
        kind, attached = type(fresh), pipe.model
        pipe.model = fresh
        with pytest.raises(AttachError, match="detach it first"):
            mmaccel.attach(pipe, "cached-blocks")
        assert type(fresh) is kind
        pipe.model = attached


def test_support_is_told() -> None:
    found = mmaccel.supports(build_pipe("refused"))
    assert found and found.family == "LLaDA2Pipeline"
    assert found.policies == ("cached-blocks", *policy_names("canvas"))


@pytest.mark.parametrize("name", policy_names("canvas"))
def test_what_is_told_to_be_supported_is(name: str) -> None:
    pipe = build_pipe("blocks")
    with mmaccel.attach(pipe, name, strict=True) as run:
        pipe(**OPTIONS)
    assert run.stats.fallbacks == []


def test_output_types_are_the_pipelines() -> None:
    pipe = build_pipe("blocks")
    for policy in POLICIES:
        for options in ({"output_type": "seq"}, {"return_dict": False}, {"prompt": ["ab", "abc"]}):
            plain = pipe(**(OPTIONS | options))
            with mmaccel.attach(pipe, policy):
                served = pipe(**(OPTIONS | options))
            assert type(served) is type(plain) and len(served) == len(plain)
            assert served[0].shape == plain[0].shape and served[0].dtype == plain[0].dtype
            texts = [out[1] if isinstance(out, tuple) else out.texts for out in (plain, served)]
            assert type(texts[0]) is type(texts[1])


@pytest.mark.parametrize("policy", POLICIES)
def test_an_interrupt_brings_the_canvas(policy: Any) -> None:
    pipe = build_pipe("blocks")
    seen: list[torch.Tensor] = []

    def stop(pipe: Any, step: int, inner: int, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append(tensors["block_x"].clone())
        if step == 5:
            raise KeyboardInterrupt
        return {}

    with mmaccel.attach(pipe, policy), pytest.raises(CanvasInterrupt) as stopped:
        pipe(**OPTIONS, callback_on_step_end=stop)
    shown = seen[-1][:, 5:21]
    tokens, is_committed = stopped.value.generation.tokens, stopped.value.is_committed
    assert tokens.shape == is_committed.shape == (1, 16) and 0 < is_committed.sum() < 16
    assert torch.equal(tokens[:, : shown.shape[1]][is_committed[:, : shown.shape[1]]],
                       shown[is_committed[:, : shown.shape[1]]])  # fmt: skip
    assert int(is_committed.sum()) == int((shown != MASK).sum())


@pytest.mark.parametrize("policy", POLICIES)
def test_bad_input_gets_clear_errors(policy: Any) -> None:
    pipe = build_pipe("blocks")
    ids = torch.tensor([[5, 6, 7], [5, MASK, 7]])
    with mmaccel.attach(pipe, policy) as handle:
        for length in (0, -3):
            with pytest.raises(ValueError, match="gen_length` must be > 0"):
                pipe(**(OPTIONS | {"gen_length": length}))
        with pytest.raises(ValueError, match="block_length` must be > 0"):
            pipe(**OPTIONS, block_length=0)
        with pytest.raises(OptionError, match="no mask token, received id 40 in row 1"):
            pipe(**(OPTIONS | {"prompt": None, "input_ids": ids}))
        with pytest.raises(TypeError, match="unexpected keyword"):
            pipe(**OPTIONS, guidance_scale=2.0)
        with torch.no_grad():
            pipe.model.lm_head.weight[4] = float("nan")
        with pytest.raises(NumericsError):
            pipe(**OPTIONS)
    assert len(handle.history) <= 1


def test_nan_is_told_whatever_runs() -> None:
    for reading in ("blocks", "full"):
        for before in (True, False):
            pipe = build_pipe(reading)
            with mmaccel.attach(pipe, "cached-blocks"):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of reading "full"
                    _ = pipe(**OPTIONS) if before else None
                with torch.no_grad():
                    pipe.model.lm_head.weight[4] = float("nan")
                with pytest.raises(NumericsError, match="received NaN"):
                    pipe(**OPTIONS)


def test_bad_options_are_refused() -> None:
    pipe = build_pipe("blocks")
    for options, match in (
        ({"seed": 3}, "give generator="),
        ({"layout": mmaccel.Grid(2, 2, vocab_size=41)}, "layout"),
        ({"cuda_graphs": True}, "not captured"),
    ):
        with pytest.raises(OptionError, match=match):
            mmaccel.attach(pipe, "cached-blocks", **options)
    with pytest.raises(OptionError, match="offers for a canvas"):
        mmaccel.attach(pipe, mmaccel.Jacobi())
    with pytest.raises(OptionError, match="expected one of pipeline, blocks"):
        mmaccel.CachedBlocks("none")
    with pytest.raises(OptionError, match="expected a policy"):
        mmaccel.attach(pipe, mmaccel.CachedBlocks)
    assert type(pipe).__module__.startswith("diffusers") and not hasattr(
        type(pipe), "_mmaccel_base"
    )


def test_a_call_within_a_call_is_refused() -> None:
    pipe = build_pipe("blocks")
    with (
        mmaccel.attach(pipe, "cached-blocks"),
        pytest.raises(BusyError, match="one call at a time"),
    ):
        pipe(**OPTIONS, callback_on_step_end=lambda *_: pipe(**OPTIONS))
