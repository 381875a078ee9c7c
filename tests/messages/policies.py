"""Fields of policies, sampling parameters, seeds and draft sources: values that none can have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mmaccel
from mmaccel import Coarse, GroupedSpeculative, Jacobi, Noise, SamplingParams, SpeculativeJacobi
from mmaccel.catalog import find_policy
from mmaccel.errors import UnsupportedModelError
from mmaccel.samplers.canvas.cache_plan import CachePlan, as_plan
from mmaccel.samplers.canvas.masked_parallel import ByOrder
from mmaccel.samplers.canvas.orders import Order
from mmaccel.samplers.canvas.selector import AtLeast
from mmaccel.samplers.drafting.contract import DraftSource
from mmaccel.samplers.drafting.sources import check_drafts
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import ToyLanguage, make_prompt
from tests.messages.case import Refused


def _bad(cls: Callable[..., Any], said: tuple[str, ...], *args: Any, **fields: Any) -> Refused:
    """A class that refuses these arguments."""
    given = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in fields.items())])
    return Refused(f"{cls.__name__}({given})", lambda: cls(*args, **fields), says=said)


def _each(cls: Callable[..., Any], field: str, values: tuple[Any, ...]) -> tuple[Refused, ...]:
    """A class that refuses these values of a field, by its name."""
    return tuple(_bad(cls, (f"{field}: expected",), **{field: value}) for value in values)


class _Last(DraftSource):
    """A class of sources, where an instance is wanted."""


CASES = (
    *_each(Jacobi, "window", (0, -1, 2.0, True, "wide", None)),
    *_each(SpeculativeJacobi, "window", (0, True, None, "adaptive")),
    *_each(GroupedSpeculative, "group", (-1, 10**20, True, 1.5)),
    *_each(GroupedSpeculative, "max_gap", (0.0, 1.5)),
    *_each(GroupedSpeculative, "groups", ("codes", None)),
    *_each(GroupedSpeculative, "neighbours", (0, 1.5)),
    *_each(GroupedSpeculative, "delta", (-0.1, 1.1)),
    *_each(GroupedSpeculative, "cap", (0.9, "2")),
    *_each(mmaccel.AcousticGroups, "radius", (-0.1, math.nan, math.inf, "0.6", True)),
    *_each(mmaccel.AcousticGroups, "vectors", ("sounds", None)),
    *_each(mmaccel.AcousticGroups, "coupling", ("none",)),
    *_each(mmaccel.AcousticGroups, "window", (0, "adaptive")),
    _bad(mmaccel.AcousticGroups, ("drafts='online'", "expected a bitwise policy"), drafts="online"),
    *_each(SpeculativeJacobi, "rising", (-0.1, 11, "1")),
    *_each(SpeculativeJacobi, "verification", ("phrase", None)),
    *_each(mmaccel.Speculative, "verification", ("phrase", None)),
    _bad(SpeculativeJacobi, ("verification", "coupling='independent'", "'maximal'", "'token'"),
         verification="block"),
    _bad(SpeculativeJacobi, ("verification", "drafts='coarse'", "'token'"),
         coupling="independent", drafts="coarse", verification="block"),
    _bad(mmaccel.Speculative, ("verification: expected no tree", "Comb", "'token'"),
         drafts="token-recycling", tree=mmaccel.Comb(3, 2), verification="block"),
    *_each(mmaccel.RowParallel, "ahead", (-1, 10**20, True, 1.5)),
    *_each(mmaccel.RowParallel, "window", (0, "adaptive")),
    _bad(mmaccel.RowParallel, ("drafts='online'", "expected a bitwise policy"), drafts="online"),
    Refused("rows of tokens that form none",
            lambda: mmaccel.RowParallel(3).sample(
                ToyLanguage(3), make_prompt([[1]]), 2, params=SamplingParams(),
                noise=Noise.from_seed(0, 1)),
            says=("rows of an image for RowParallel", "ToyLanguage", "SpeculativeJacobi()")),
    Refused("groups of codes that a model has not",
            lambda: GroupedSpeculative(3, groups="latent").sample(
                ToyLanguage(3), make_prompt([[1]]), 2, params=SamplingParams(),
                noise=Noise.from_seed(0, 1)),
            says=("groups: expected a model with a code", "3 tokens", "ToyLanguage", "'ranks'")),
    Refused("groups by vectors that a model has not",
            lambda: mmaccel.AcousticGroups(3, vectors="codes").sample(
                ToyLanguage(3), make_prompt([[1]]), 2, params=SamplingParams(),
                noise=Noise.from_seed(0, 1)),
            says=("vectors: expected a model with a vector", "3 tokens", "'codes'", "ToyLanguage",
                  "choose 'embeddings'", "GroupedSpeculative()")),
    *_each(SamplingParams, "guidance_scale", (math.nan, math.inf)),
    *_each(SamplingParams, "temperature", (-0.1, math.nan, math.inf, 1e-320, 9e-31)),
    *_each(SamplingParams, "top_k", (0, True)),
    *_each(SamplingParams, "top_p", (0.0, 1.01, math.nan)),
    *_each(SamplingParams, "min_p", (-0.1, 1.1)),
    *_each(SamplingParams, "top_n_sigma", (0.0, -1.0, math.inf)),
    *_each(SamplingParams, "top_h", (0.0, 1.01, math.nan)),
    *_each(SamplingParams, "eta_cutoff", (0.0, 1.0, "0.1")),
    *_each(SamplingParams, "entropy_temperature", (0.0, math.inf)),
    *_each(SamplingParams, "divergence_temperature", (0.0, True)),
    *_each(SamplingParams, "spread", (1, 2.0, True)),
    Refused("evenly spread samples with fresh noise",
            lambda: SpeculativeJacobi(3).sample(ToyLanguage(3), make_prompt([[1]]), 2,
                                                params=SamplingParams(spread=2),
                                                noise=Noise.from_seed(0, 1)),
            says=("spread: expected None under SpeculativeJacobi", "Jacobi()")),
    *(_bad(Coarse, ("rounds: expected an integer >= 1",), "folder", 16, each) for each in (0, 1.5)),
    *(_bad(Coarse, ("candidates: expected an integer >= 1",), "folder", each)
      for each in (0, -1, True, 1.5, "3", None)),
    *(_bad(Coarse, ("Coarse.folder: expected a str",), each) for each in (None, 3, ["folder"])),
    *(Refused(f"seed {seed} for {rows}", lambda seed=seed, rows=rows: Noise.from_seed(seed, rows),
              says=("seed: expected", "received"))
      for seed, rows in (([1, 2], 3), (2**64, 1), (-(2**63) - 1, 1), ([0, 2**64], 2))),
    _bad(Jacobi, ("drafts: expected one of auto", "'up'"), drafts="up"),
    _bad(Jacobi, ("drafts: expected one of auto",), drafts=_Last),
    Refused("a source of no policy", lambda: check_drafts("up", "bitwise"), says=("auto", "'up'")),
    _bad(SpeculativeJacobi, ("drafts='online'", "expected a bitwise policy", "coarse"),
         drafts="online"),
    _bad(mmaccel.Speculative, ("draft_model: expected", "'gpt2'"), 3, "gpt2"),
    _bad(mmaccel.Speculative, ("draft_model", "AutoModelForCausalLM.from_pretrained"), 4, [1]),
    Refused(
        "a decoder without a head as a draft model",
        lambda: mmaccel.Speculative(4, build_lm("llama", num_hidden_layers=1).model),
        says=("AutoModelForCausalLM",),
        error=UnsupportedModelError,
    ),
    *(_bad(mmaccel.ContinuousBatching, ("expected an integer >= 1",), rows)
      for rows in (0, -1, True, 2.0, None)),
    # trees
    _bad(Jacobi, ("tree", "Comb", "7"), window=32, drafts="coarse", tree=7),
    _bad(Jacobi, ("window", "8", "shorter branches"), window=8, drafts="coarse",
         tree=mmaccel.Comb(3, 8)),
    _bad(Jacobi, ("window", "adaptive"), window="adaptive", drafts="coarse",
         tree=mmaccel.Comb(3, 4)),
    _bad(Jacobi, ("drafts", "alternatives", "token-recycling"), window=32, drafts="left",
         tree=mmaccel.Comb(3, 4)),
    *_each(mmaccel.Comb, "branches", (0, 2.5)),
    *_each(mmaccel.Comb, "length", (0,)),
    # canvas policies and their parts
    _bad(AtLeast, ("n: expected an integer >= 1",), 0, ByOrder(Order("confidence", None))),
    _bad(mmaccel.EntropyBounded, ("gamma: expected a finite number >= 0",), -0.1),
    _bad(mmaccel.EntropyBounded, ("expected one of both",), 0.1, 1.0),
    *_each(mmaccel.EntropyBounded, "budget_nats", (-1,)),
    _bad(mmaccel.ConfidentParallel, ("threshold: expected a number in 0..1",), 1.5),
    *_each(mmaccel.ConfidentParallel, "rule", ("factor",)),
    *_each(mmaccel.ConfidentParallel, "end_threshold", (1.5,)),
    _bad(mmaccel.KLStable, ("steps: expected an integer >= 1",), steps=0),
    _bad(mmaccel.KLStable, ("settled: expected a finite number >= 0",), settled=-1),
    *_each(mmaccel.ExploreExploit, "threshold", (-0.1, 1.1)),
    *_each(mmaccel.ExploreExploit, "least", (-1, 1.5)),
    *_each(mmaccel.ExploreExploit, "explore", (-1, True)),
    *_each(mmaccel.LearnedFilter, "threshold", (-0.1, "0.5")),
    *_each(mmaccel.LearnedFilter, "filter", (3, None)),
    _bad(mmaccel.LocalLeap, ("radius: expected an integer >= 0",), radius=-1),
    _bad(mmaccel.AdaptiveBlock, ("delimiters: expected an integer", "as (198,)"), ("x",)),
    *_each(mmaccel.MaskedParallel, "order", ("entropy",)),
    _bad(mmaccel.MaskedParallel, ("schedule: expected None",), None, "cosine"),
    _bad(mmaccel.RevisedParallel, ("revise: expected one of shadow, edit",), revise="again"),
    _bad(mmaccel.RevisedParallel, ("budget: expected an integer >= 0",), budget=-1),
    _bad(mmaccel.Stepwise, ("order: expected one of auto, confidence",), order="best"),
    _bad(mmaccel.Stepwise, ("block: expected an integer >= 1, received 0; None takes",), block=0),
    _bad(mmaccel.Stepwise, ("cache kind: expected one of none",), cache="fast"),
    _bad(mmaccel.LosslessUnmask, ("drafts: expected an integer in 1..256, received 0",), 0),
    _bad(mmaccel.LosslessUnmask, ("received True",), drafts=True),
    _bad(mmaccel.LosslessUnmask, ("does not depend on what was drawn",), order="sampled"),
    _bad(mmaccel.LosslessUnmask, ("expected 'entries'",), layout="rows", cache="dual"),
    _bad(CachePlan, ("expected one of none, prefix",), kind="half"),
    _bad(CachePlan, ("cache refresh: expected an integer >= 1, received 0; None",), refresh=0),
    _bad(CachePlan, ("cache margin: expected an integer >= 0, received -1",), margin=-1),
    _bad(CachePlan, ("cache far",), far=True),
    _bad(CachePlan, ("neither refresh nor far",), kind="block", refresh=4),
    _bad(as_plan, ("expected a CachePlan or one of",), 3),
    Refused(
        "a canvas policy for a window",
        lambda: find_policy("stepwise", "window"),
        says=("'stepwise'", "which decodes a canvas, not a window"),
    ),
    Refused(
        "a canvas policy for an object",
        lambda: mmaccel.attach(object(), mmaccel.EntropyBounded()),  # type: ignore[arg-type]
        says=("expected a transformers model that generates, received a object",),
        error=UnsupportedModelError,
    ),
    # methods of layers
    *_each(mmaccel.SnapKV, "budget", (0, 32)),
    *_each(mmaccel.SnapKV, "every", (0, 2.5)),
    *_each(mmaccel.SnapKV, "window", (0,)),
    _bad(mmaccel.SnapKV, ("kernel", "odd", "5"), kernel=4),
    *_each(mmaccel.QuantizedCache, "bits", (2, "4")),
    *_each(mmaccel.QuantizedCache, "group", (0, 2.5)),
    *_each(mmaccel.QuantizedCache, "residual", (0, 2.5)),
    _bad(mmaccel.QuantizedCache, ("group", "an even number", "7", "give 8"), group=7),
    *_each(mmaccel.PyramidKV, "budget", (32,)),
    *_each(mmaccel.PyramidKV, "slope", (0, 2.5)),
    *_each(mmaccel.ChunkKV, "budget", (32,)),
    *_each(mmaccel.ChunkKV, "chunk", (0,)),
    *_each(mmaccel.ChunkKV, "window", (0,)),
    *_each(mmaccel.ChunkKV, "reuse", (0,)),
    *_each(mmaccel.CItruS, "budget", (64,)),
    *_each(mmaccel.CItruS, "instruction", (0,)),
    *_each(mmaccel.H2O, "recent", (-0.1, 1.5)),
    *_each(mmaccel.VATP, "sinks", (-1, 513)),
    *_each(mmaccel.ExpectedAttention, "window", (0,)),
    *_each(mmaccel.ExpectedAttention, "sinks", (-1, 1024)),
    *_each(mmaccel.KNorm, "first_layer", (-1,)),
    *_each(mmaccel.MorphKV, "budget", (32,)),
    *_each(mmaccel.MorphKV, "window", (0,)),
    *_each(mmaccel.LineKV, "budget", (112,)),
    *_each(mmaccel.LineKV, "every", (None, 0)),
    *_each(mmaccel.LineKV, "lines", (0,)),
    *_each(mmaccel.LineKV, "sinks", (-1,)),
    *_each(mmaccel.StreamingLLM, "rerotate", ("yes", None)),
    _bad(mmaccel.StreamingLLM, ("every", "rerotate=True", "received 64"), rerotate=True, every=64),
    *_each(mmaccel.KVzap, "budget", (0,)),
    *_each(mmaccel.KVzap, "every", (0,)),
    _bad(mmaccel.KVzap, ("window: expected at most 9", "received 64"), 8, every=9),
    *_each(mmaccel.KVzap, "threshold", (math.inf, math.nan, "high")),
    *_each(mmaccel.KVzap, "window", (0,)),
    *_each(mmaccel.Chelsea, "budget", (68,)),
    *_each(mmaccel.Chelsea, "chunk", (1,)),
    *_each(mmaccel.Chelsea, "sinks", (-1,)),
    *_each(mmaccel.Chelsea, "recent", (0,)),
    *_each(mmaccel.Chelsea, "every", (64,)),
    *_each(mmaccel.BiLevelKV, "chunk", (1, 2.5)),
    *_each(mmaccel.BiLevelKV, "pool", (1,)),
    *_each(mmaccel.BiLevelKV, "question", (0,)),
    *_each(mmaccel.BiLevelKV, "every", (64,)),
    _bad(mmaccel.BiLevelKV, ("chunk", "multiple of the pool of 8", "250", "try 256"), chunk=250),
    *_each(mmaccel.KVzip, "sinks", (-1, 1024)),
    *_each(mmaccel.KVzip, "piece", (0,)),
    *_each(mmaccel.KVzip, "every", (64,)),
    *_each(mmaccel.DuoAttention, "sinks", (-1, 384)),
    *_each(mmaccel.DuoAttention, "share", (-0.1, 1.5)),
    *_each(mmaccel.DuoAttention, "window", (0,)),
    *_each(mmaccel.DuoAttention, "every", (0,)),
    *_each(mmaccel.RaaS, "every", (None, 0)),
    *_each(mmaccel.RaaS, "threshold", (-0.1, 1.5)),
    *_each(mmaccel.RandomEviction, "seed", (-1, 2**32)),
    *_each(mmaccel.ActQKV, "by_layer", (1, None)),
    *_each(mmaccel.Quest, "budget", (0, 1.5)),
    *_each(mmaccel.Quest, "block", (0,)),
    *_each(mmaccel.Quest, "first_layer", (-1,)),
)  # fmt: skip
