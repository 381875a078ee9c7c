"""Reducers of visual tokens: fields, plans of other people, models without what a method needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import mmaccel
from mmaccel import (
    DART,
    DivPrune,
    DownsamplePixels,
    FastV,
    FiCoCoV,
    HiRED,
    LazyLLM,
    PyramidDrop,
    RandomTokens,
    ToMe,
    UniformTokens,
    UnsupportedModelError,
)
from mmaccel.errors import AttachError, ShapeError
from mmaccel.reduction.visual_tokens.context import VisualContext, make_context
from mmaccel.reduction.visual_tokens.contract import TokenReducer, read_reducers
from mmaccel.reduction.visual_tokens.plan import keep_tokens
from tests.fixtures.tiny_lms import shared_lm
from tests.fixtures.tiny_vlms import (
    build_vlm,
    draw_prompts,
    encodes_first,
    shared_vlm,
)
from tests.messages.case import Refused
from tests.reduction.samples import batch, image

ROWS, N = 2, 6
VALID = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 0]], dtype=torch.bool)
SCORES = torch.rand(ROWS, N)


def _own(scores: Any = SCORES, chosen: Any = None, **changes: Any) -> Callable[[], Any]:
    """The plan of somebody else's reducer with these scores, choice, or fields of its plan."""

    @dataclass(frozen=True)
    class Own(TokenReducer):
        def score(self, context: VisualContext) -> Tensor:
            return scores

        def select(self, scores: Tensor, context: VisualContext, budget: Tensor) -> Any:
            if chosen is None:
                return replace(super().select(scores, context, budget), **changes)
            if isinstance(chosen, Tensor):
                return keep_tokens(chosen, context.valid, context.size)
            return chosen

    return lambda: Own(n_keep=2).plan(make_context(torch.zeros(ROWS, N, 4)))


def _attach(name: str, *methods: Any, policy: Any = "jacobi") -> Callable[[], Any]:
    """Attaching to a vision-language model."""
    given = methods[0] if len(methods) == 1 else list(methods)
    return lambda: mmaccel.attach(shared_vlm(name), policy, visual_tokens=given)


def _answer(name: str, method: Any, draw: Any = draw_prompts, rows: Any = (1,)) -> Any:
    """A call of a vision-language model."""
    return lambda: _generate(shared_vlm(name), method, draw(name, shared_vlm(name), rows))


def _generate(model: Any, method: Any, inputs: Any, policy: Any = "jacobi", **options: Any) -> Any:
    with mmaccel.attach(model, policy, strict=True, visual_tokens=method):
        return model.generate(**inputs, max_new_tokens=2, do_sample=False, **options)


def _first_layer() -> Any:
    """The states of its only layer, before which nothing can be merged."""
    model = shared_vlm("llava")
    given = draw_prompts("llava", model) | {"vision_feature_layer": 1}
    return _generate(model, ToMe(n_keep=6, features="all"), given)


FIELDS = (
    Refused("neither budget", DART, ("one of keep and n_keep", "received neither")),
    Refused("both budgets", lambda: DART(keep=0.5, n_keep=3), ("received 0.5 and 3",)),
    Refused("a layer that is not there", lambda: FastV(keep=0.5, layer=30).layers_of(24),
            ("in 1..23", "received 30")),
    Refused("a scorer that does not rank", lambda: HiRED(keep=0.5, scorer=DivPrune(keep=0.5)),
            ("method that ranks",)),
    Refused("two of a stage", lambda: read_reducers([FastV(keep=1), DART(keep=1)]),
            ("one method a stage",)),
    Refused("a context at another layer",
            lambda: PyramidDrop(keep=0.2).plan(batch([image(4, 4, 1)], layer=3)),
            ("layers (2, 4, 6)", "received layer 3 of 8")),
    Refused("a class token that the encoder lacks",
            lambda: HiRED(keep=0.2).plan(make_context(torch.zeros(ROWS, N, 4))),
            ("attention of an encoder's class token", "DivPrune"), UnsupportedModelError),
)  # fmt: skip

PLANS = tuple(
    Refused(name, call, says, ShapeError)
    for name, call, says in (
        ("a mask of another width",
         lambda: keep_tokens(torch.ones(2, 5, dtype=torch.bool), VALID),
         ("expected a mask [2, 6]", "or indices [2, k]")),
        ("scores of three axes", _own(torch.rand(ROWS, N, 1)),
         ("Own.score: expected [2, 6] of float", "received [2, 6, 1] of torch.float32")),
        ("chosen tokens beyond the last", _own(chosen=torch.tensor([[0, 1], [2, N]])),
         ("Own.select", "plan: expected indices below 6", "received 6;")),
    )
)  # fmt: skip

_HALF = DownsamplePixels(keep=0.25)
_GIVEN = tuple(  # what is no method
    Refused(f"visual_tokens={given!r}", _attach("llava", given), ("visual_tokens", *says))
    for given, says in (
        ([RandomTokens(keep=0.5), UniformTokens(keep=0.5)], ("expected",)),
        ("dartt", ("did you mean dart",)),
        ({"keep": 0.5}, ("a dictionary with a name",)),
        ({"name": "dart", "kepp": 0.5}, ("'kepp'",)),
    )
)
_BLOCKS = "2 x 2 blocks"
_MODELS = tuple(
    Refused(name, call, says, UnsupportedModelError)
    for name, call, says in (
        ("a model without images",
         lambda: mmaccel.attach(shared_lm("llama"), "jacobi", visual_tokens=RandomTokens(keep=0.5)),
         ("visual_tokens: expected a vision-language",)),
        *(
            (f"merging in the encoder of {name}", _attach(name, ToMe(keep=0.5)), (reason, "FastV"))
            for name, reason in (
                ("qwen2_vl", _BLOCKS), ("qwen2_5_vl", "in windows"), ("qwen3_vl", _BLOCKS),
                ("chameleon", "a VQGAN"),
            )
        ),
        *(
            (f"smaller images of {name}", _attach(name, _HALF), (reason,))
            for name, reason in (("gemma3", "pools a grid of one size"), ("chameleon", "a VQGAN"))
        ),
        ("the class token of an encoder without one",
         _attach("llava_onevision", FiCoCoV(keep=0.5)),
         ("class token", "no cls_attention in its encoder", "DivPrune")),
        ("merged features of a pooled grid", _attach("gemma3", ToMe(keep=0.5, features="merged")),
         ('pools or shuffles the grid; give features="',)),
        ("a layer before the last that images enter",
         _attach("qwen3_vl", FastV(keep=0.5, layer=1)), ("from 2 on",)),
    )
)  # fmt: skip
_WINDOWS = tuple(
    Refused(
        f"revival under {policy!r}",
        _attach("llava", LazyLLM(keep=0.5), policy=policy),
        ("Autoregressive()", "LazyLLM", "revives"),
    )
    for policy in (mmaccel.Jacobi(4), mmaccel.Speculative(), "jacobi")
)
_CALLS = (
    Refused("a layer beyond the encoder's last", _attach("llava", ToMe(keep=0.5, layers=(1, 2))),
            ("layer: expected an integer in 1..1, received 2",)),
    Refused("states before any layer that could merge", _first_layer, ("received 0",)),
    Refused(
        "a reduced cache for the caller",
        lambda: _generate(
            shared_vlm("llava"),
            DivPrune(keep=0.5),
            draw_prompts("llava", shared_vlm("llava"), (1,)),
            return_dict_in_generate=True,
        ),
        ("a cache that the caller sees",),
        AttachError,
    ),
)  # fmt: skip
OLD = (
    Refused("a transformers that encodes images in its first pass",
            lambda: mmaccel.attach(build_vlm("llava"), "jacobi", visual_tokens=DivPrune(keep=0.5)),
            ("install transformers 5.23",), UnsupportedModelError),
)  # fmt: skip
CASES = FIELDS + PLANS + (_GIVEN + _MODELS + _WINDOWS + _CALLS if encodes_first() else OLD)
