"""Reducers of visual tokens: fields, plans of other people, models without what a method needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor

import mmaccel
from mmaccel import (
    DART,
    EVS,
    DivPrune,
    DownsamplePixels,
    FastV,
    FiCoCoV,
    HiRED,
    ILRe,
    LazyLLM,
    PixelPrune,
    PyramidDrop,
    RandomTokens,
    ToMe,
    UniformTokens,
    UnsupportedModelError,
    VisionZip,
)
from mmaccel.errors import AttachError, ShapeError
from mmaccel.reduction.visual_tokens.context import VisualContext, make_context
from mmaccel.reduction.visual_tokens.contract import TokenReducer, check_reducers
from mmaccel.reduction.visual_tokens.plan import keep_tokens
from tests.fixtures.tiny_lms import shared_lm
from tests.fixtures.tiny_vlms import (
    IMAGE,
    TEXT,
    build_vlm,
    draw_prompts,
    draw_videos,
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


def _shortened_already() -> Any:
    """Three placeholders fewer than features."""
    inputs = draw_prompts("llava", shared_vlm("llava"), (1,))
    at = int((inputs["input_ids"][0] == IMAGE).nonzero()[0])
    for name in ("input_ids", "attention_mask"):
        inputs[name] = torch.cat([inputs[name][:, :at], inputs[name][:, at + 3 :]], 1)
    return _generate(shared_vlm("llava"), RandomTokens(keep=0.5), inputs)


def _encoded(name: str, method: Any, *without: str) -> Callable[[], Any]:
    """A call with images that the caller encoded, and without some of its arguments."""

    def call() -> Any:
        model = shared_vlm(name)
        inputs = draw_prompts(name, model, (1,))
        names = ("pixel_values", "image_sizes", "image_grid_thw")
        given = {key: inputs[key] for key in names if key in inputs}
        with torch.no_grad():
            made = model.base_model.get_image_features(**given, return_dict=True)
        left = {k: v for k, v in inputs.items() if k not in ("pixel_values", *without)}
        return _generate(model, method, left, mm_encoder_outputs={"image": made})

    return call


def _small_drafter() -> Any:
    config = transformers.LlamaConfig(**TEXT | {"vocab_size": 64})
    drafter = mmaccel.CausalLMWindow(transformers.LlamaForCausalLM(config).eval())
    model = shared_vlm("llava")
    policy = mmaccel.Speculative(window=4, draft_model=drafter)
    return _generate(model, None, draw_prompts("llava", model), policy)


def _first_layer() -> Any:
    """The states of its only layer, before which nothing can be merged."""
    model = shared_vlm("llava")
    given = draw_prompts("llava", model) | {"vision_feature_layer": 1}
    return _generate(model, ToMe(n_keep=6, features="all"), given)


_PARTS = frozenset({"keys", "all_attention", "grid", "tiles"})

FIELDS = (
    Refused("neither budget", DART, ("one of keep and n_keep", "received neither")),
    Refused("no budget of pixels", DownsamplePixels, ("one of keep and n_keep",)),
    Refused("both budgets of a rule", lambda: PixelPrune(keep=0.5, n_keep=3),
            ("received 0.5 and 3",)),
    Refused("a threshold below 0", lambda: PixelPrune(threshold=-0.1),
            ("PixelPrune.threshold: expected a finite number >= 0", "-0.1")),
    Refused("patches in a context of tokens",
            lambda: PixelPrune().plan(make_context(torch.zeros(1, 4, 2))),
            ("the image's pixels", "DivPrune works after the encoder"), UnsupportedModelError),
    Refused("both budgets", lambda: DART(keep=0.5, n_keep=3), ("received 0.5 and 3",)),
    Refused("keep=0", lambda: DART(keep=0), ("DART.keep: expected a number in (0, 1]", "0")),
    Refused("keep=1.01", lambda: DART(keep=1.01), ("expected a number in (0, 1]", "1.01")),
    Refused("keep=True", lambda: FastV(keep=True), ("a number in (0, 1]", "received True")),
    Refused("n_keep=0", lambda: FastV(n_keep=0), ("FastV.n_keep: expected an integer >= 1", "0")),
    Refused("layer 0", lambda: FastV(keep=0.5, layer=0), ("an integer >= 1", "received 0")),
    Refused("a layer that is not there", lambda: FastV(keep=0.5, layer=30).layers_in(24),
            ("in 1..23", "received 30")),
    Refused("descending layers", lambda: PyramidDrop(keep=0.5, layers=(8, 4)),
            ("ascending layers",)),
    Refused("one layer for a list", lambda: PyramidDrop(keep=0.5, layers=8),
            ("layers: expected a list", "received 8")),
    Refused("a threshold of 2", lambda: ToMe(keep=0.5, threshold=2),
            ("ToMe.threshold: expected a number in -1..1",)),
    Refused("unknown features", lambda: ToMe(keep=0.5, features="both"),
            ("features: expected one of auto, merged, all",)),
    Refused("an even kernel", lambda: ILRe(keep=0.5, kernels=(2,)), ("expected odd widths",)),
    Refused("one kernel for a list", lambda: ILRe(keep=0.5, kernels=3),
            ("odd widths", "received 3")),
    Refused("a scorer by name", lambda: HiRED(keep=0.5, scorer="evs"),
            ("method that ranks tokens", "received 'evs'")),
    Refused("a scorer that does not rank", lambda: HiRED(keep=0.5, scorer=DivPrune(keep=0.5)),
            ("method that ranks",)),
    Refused("unknown queries", lambda: VisionZip(keep=0.5, queries="text"),
            ("expected one of cls, all",)),
    Refused("a name", lambda: check_reducers("dart"), ("a method such as mmaccel.DART",)),
    Refused("no method", lambda: check_reducers([]), ("one method a stage",)),
    Refused("two of a stage", lambda: check_reducers([FastV(keep=1), DART(keep=1)]),
            ("one method a stage",)),
    Refused("a context at another layer",
            lambda: PyramidDrop(keep=0.2).plan(batch([image(4, 4, 1)], layer=3)),
            ("layers (2, 4, 6)", "received layer 3 of 8")),
    Refused("pixels in a context of tokens",
            lambda: DownsamplePixels(keep=0.25).plan(make_context(torch.zeros(1, 4, 2))),
            ("expected the image's pixels",), UnsupportedModelError),
    Refused("a class token that the encoder lacks",
            lambda: HiRED(keep=0.2).check(_PARTS, "SiglipVisionModel"),
            ("attention of an encoder's class token", "queries='all'"), UnsupportedModelError),
    Refused("the same, with another remedy",
            lambda: VisionZip(keep=0.2).check(_PARTS, "SiglipVisionModel"),
            ("class token", "SiglipVisionModel without", "DivPrune"), UnsupportedModelError),
    Refused("frames of single images", lambda: EVS(keep=0.2).check(_PARTS, "SiglipVisionModel"),
            ("a video in frames", "single images"), UnsupportedModelError),
)  # fmt: skip

PLANS = tuple(
    Refused(name, call, says, ShapeError)
    for name, call, says in (
        ("a mask of another width",
         lambda: keep_tokens(torch.ones(2, 5, dtype=torch.bool), VALID),
         ("expected a mask [2, 6]", "or indices [2, k]")),
        ("indices of other rows",
         lambda: keep_tokens(torch.zeros(3, 2, dtype=torch.int64), VALID),
         ("choose among the tokens",)),
        ("scores of three axes", _own(torch.rand(ROWS, N, 1)),
         ("Own.score: expected [2, 6] of float", "received [2, 6, 1] of torch.float32")),
        ("scores of one axis", _own(torch.rand(N)), ("Own.score", "[6] of torch.float32")),
        ("scores of integers", _own(torch.zeros(ROWS, N, dtype=torch.int64)),
         ("Own.score", "received [2, 6] of torch.int64")),
        ("scores in a list", _own([0.5] * N), ("Own.score", "received a list; see")),
        ("no scores", _own(None), ("Own.score", "received a NoneType; see")),
        ("chosen tokens beyond the last", _own(chosen=torch.tensor([[0, 1], [2, N]])),
         ("Own.select", "plan: expected indices below 6", "received 6;")),
        ("a choice for one row", _own(chosen=torch.tensor([[0, 1]])),
         ("Own.select", "expected a mask [2, 6] of torch.bool or indices [2, k]")),
        ("short indices", _own(chosen=torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)),
         ("Own.select", "received [2, 2] of torch.int32;")),
        ("a choice of floats", _own(chosen=torch.ones(ROWS, N)),
         ("Own.select", "received [2, 6] of torch.float32;")),
        ("a choice in words", _own(chosen="the first two"),
         ("Own.select", "plan: expected a Plan, received a str; return keep_tokens")),
        ("a plan that keeps a token beyond the last", _own(keep=torch.tensor([[0, 1], [2, N]])),
         ("Own.select", "expected keep below 6 tokens", "received 6 and")),
        ("a plan of more slots", _own(assign=torch.full((ROWS, N), 2)),
         ("Own.select", "assign below 2 slots", "and 2;")),
        ("a plan of fewer tokens", _own(assign=torch.zeros(ROWS, 5, dtype=torch.int64)),
         ("Own.select", "plan.assign: expected [2, 6]")),
        ("weights in float64", _own(weight=torch.ones(ROWS, N).double()),
         ("Own.select", "plan.weight: ", "received [2, 6] of torch.float64;")),
        ("sizes of one slot", _own(size=torch.ones(ROWS, 1)),
         ("Own.select", "plan.size: expected [2, 2]", "received [2, 1]")),
    )
)  # fmt: skip

_HALF = DownsamplePixels(keep=0.25)
_GIVEN = tuple(  # what is no method
    Refused(f"visual_tokens={given!r}", _attach("llava", given), ("visual_tokens", *says))
    for given, says in (
        ("nowhere", ("expected",)),
        (RandomTokens, ("expected",)),
        ([], ("expected",)),
        ([RandomTokens(keep=0.5), UniformTokens(keep=0.5)], ("expected",)),
        ("dartt", ("did you mean dart",)),
        ({"keep": 0.5}, ("a dictionary with a name",)),
        ({"name": "dart", "kepp": 0.5}, ("'kepp'",)),
        (0.5, ("a method such as",)),
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
            (f"smaller images of {name}", _attach(name, _HALF), (reason, "use Downsample"))
            for name, reason in (("gemma3", "pools a grid of one size"), ("chameleon", "a VQGAN"))
        ),
        ("patches of a VQGAN", _attach("chameleon", PixelPrune()),
         ("patches have positions of their own", "a VQGAN", "DivPrune works after")),
        ("patches dropped and merged", _attach("llava", PixelPrune(), ToMe(keep=0.5)),
         ("one method before or in the encoder",)),
        ("patches dropped of an encoder that is read",
         _attach("llava", PixelPrune(), VisionZip(keep=0.5)),
         ("whose encoder PixelPrune", "reduces without")),
        ("the class token of an encoder without one",
         _attach("llava_onevision", FiCoCoV(keep=0.5)),
         ("class token", "received the encoder", "ToMe merges")),
        ("merged features of a pooled grid", _attach("gemma3", ToMe(keep=0.5, features="merged")),
         ('pools or shuffles the grid; give features="',)),
        ("an encoder that is merged and read",
         _attach("llava", ToMe(keep=0.5), VisionZip(keep=0.5)),
         ("whose encoder ToMe", "reduces without")),
        ("an encoder that is read and gets smaller images",
         _attach("llava", _HALF, VisionZip(keep=0.5)),
         ("whose encoder DownsamplePixels", "reduces without")),
        ("two methods in front of and in the encoder", _attach("llava", _HALF, ToMe(keep=0.5)),
         ("one method before or in the encoder",)),
        ("layers that slide", _attach("gemma3", FastV(keep=0.5)),
         ("sliding windows; use a method at the enc",)),
        ("revival in layers that slide",
         _attach("gemma3", LazyLLM(keep=0.5), policy="autoregressive"), ("sliding windows",)),
        ("a layer before the last that images enter",
         _answer("qwen3_vl", FastV(keep=0.5, layer=1)), ("from 2 on",)),
        ("smaller frames of a model without frames",
         _answer("llava_onevision", _HALF, draw_videos, (2,)),
         ("video features that are tokens of the enc",)),
        ("merged features of a video",
         _answer("llava_onevision", ToMe(keep=0.5, features="merged"), draw_videos, (2, 2)),
         ("video features that are tokens of the enc",)),
        ("a prompt that was shortened already", _shortened_already,
         ("a placeholder for each of the 16 image feat",)),
    )
)  # fmt: skip
_WINDOWS = tuple(
    Refused(
        f"revival under {policy!r}",
        _attach("llava", LazyLLM(keep=0.5), policy=policy),
        ("Autoregressive() with LazyLLM", "PyramidDrop"),
    )
    for policy in (mmaccel.Jacobi(4), mmaccel.Speculative(), "jacobi")
)
_CALLS = (
    Refused("a layer beyond the encoder's last", _attach("llava", ToMe(keep=0.5, layers=(1, 2))),
            ("layer: expected an integer in 1..1, received 2",)),
    Refused("a layer that the encoder lacks",
            _answer("llava", mmaccel.VisionZip(keep=0.5, layer=99)),
            ("visual_tokens: layer: expected an integer in -3..2, received 99", "the encoder's")),
    Refused("an early layer that the encoder lacks",
            _answer("llava_next", mmaccel.HiRED(keep=0.5, early=99)),
            ("visual_tokens: layer: expected an integer in -3..2, received 99",)),
    Refused("states before any layer that could merge", _first_layer, ("ascending layers",)),
    Refused("a drafter of other words", _small_drafter, ("a vocabulary of 128", "received 64")),
    *(
        Refused(
            f"encoded images for {type(method).__name__}",
            _encoded("llava_next", method),
            ("which reads the encoder",),
            AttachError,
        )
        for method in (HiRED(keep=0.5), VisionZip(keep=0.5))
    ),
    *(
        Refused(
            f"encoded images without {missing}",
            _encoded(name, DivPrune(keep=0.5), missing),
            (f"given by the caller without {missing}",),
            AttachError,
        )
        for name, missing in (("llava_next", "image_sizes"), ("qwen2_vl", "image_grid_thw"))
    ),
    Refused("encoded images for a method in the encoder", _encoded("llava_next", ToMe(keep=0.4)),
            ("mm_encoder_outputs given by the caller",), AttachError),
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
