"""Fields of policies, sampling parameters, seeds and draft sources: values that none can have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mmaccel
from mmaccel import GroupedSpeculative, Jacobi, Noise, SamplingParams, SpeculativeJacobi
from mmaccel.catalog import find_policy
from mmaccel.errors import UnsupportedModelError
from mmaccel.samplers.canvas.cache_plan import CachePlan, as_plan
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


CASES = (
    *_each(Jacobi, "window", (0, -1, 2.0, True, "wide", None)),
    *_each(SpeculativeJacobi, "window", (0, True, None, "adaptive")),
    _bad(SpeculativeJacobi, ("verification", "coupling='independent'", "'maximal'", "'token'"),
         verification="block"),
    _bad(SpeculativeJacobi, ("verification", "drafts='coarse'", "'token'"),
         coupling="independent", drafts="coarse", verification="block"),
    _bad(mmaccel.Speculative, ("verification: expected no tree", "Comb", "'token'"),
         drafts="token-recycling", tree=mmaccel.Comb(3, 2), verification="block"),
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
    Refused("evenly spread samples with fresh noise",
            lambda: SpeculativeJacobi(3).sample(ToyLanguage(3), make_prompt([[1]]), 2,
                                                params=SamplingParams(spread=2),
                                                noise=Noise.from_seed(0, 1)),
            says=("spread: expected None under SpeculativeJacobi", "Jacobi()")),
    *(Refused(f"seed {seed} for {rows}", lambda seed=seed, rows=rows: Noise.from_seed(seed, rows),
              says=("seed: expected", "received"))
      for seed, rows in (([1, 2], 3), (2**64, 1), (-(2**63) - 1, 1), ([0, 2**64], 2))),
    _bad(Jacobi, ("drafts: expected one of auto", "'up'"), drafts="up"),
    _bad(SpeculativeJacobi, ("drafts='online'", "expected a bitwise policy", "coarse"),
         drafts="online"),
    _bad(mmaccel.Speculative, ("draft_model", "AutoModelForCausalLM.from_pretrained"), 4, [1]),
    Refused(
        "a decoder without a head as a draft model",
        lambda: mmaccel.Speculative(4, build_lm("llama", num_hidden_layers=1).model),
        says=("AutoModelForCausalLM",),
        error=UnsupportedModelError,
    ),
    # trees
    _bad(Jacobi, ("tree", "Comb", "7"), window=32, drafts="coarse", tree=7),
    _bad(Jacobi, ("window", "8", "shorter branches"), window=8, drafts="coarse",
         tree=mmaccel.Comb(3, 8)),
    _bad(Jacobi, ("window", "adaptive"), window="adaptive", drafts="coarse",
         tree=mmaccel.Comb(3, 4)),
    _bad(Jacobi, ("drafts", "alternatives", "token-recycling"), window=32, drafts="left",
         tree=mmaccel.Comb(3, 4)),
    # canvas policies and their parts
    _bad(mmaccel.EntropyBounded, ("expected one of both",), 0.1, 1.0),
    _bad(mmaccel.MaskedParallel, ("schedule: expected None",), None, "cosine"),
    *_each(SamplingParams, "temperature", (1e-320, 9e-31)),
    _bad(mmaccel.Stepwise, ("cache kind: expected one of none",), cache="fast"),
    _bad(mmaccel.LosslessUnmask, ("expected 'entries'",), layout="rows", cache="dual"),
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
    _bad(mmaccel.StreamingLLM, ("every", "rerotate=True", "received 64"), rerotate=True, every=64),
    _bad(mmaccel.KVzap, ("window: expected at most 9", "received 64"), 8, every=9),
)  # fmt: skip
