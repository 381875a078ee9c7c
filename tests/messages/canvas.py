"""Runs over canvases: models, caches and prompts that do not fit, before the first pass."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

import mmaccel
from mmaccel import LosslessUnmask, Noise, RevisedParallel, SamplingParams, Stepwise
from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError, ShapeError, UnsupportedModelError
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser
from mmaccel.pipelines.diffusion_lm.masked_lm import MaskedLM
from mmaccel.samplers.canvas.state import Canvas
from tests.canvas.test_leak_check import Blocks
from tests.canvas.test_state import Given
from tests.fixtures.canvas import MASK, decode, masked, run
from tests.fixtures.joints import families
from tests.fixtures.kv_reference import KVReference
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import ToyLanguage
from tests.messages.case import Refused

JOINT = families(4, 3)["markov"]
PLAIN, RIGHT = SamplingParams(), [1]


def _sample(
    name: str, says: str, error: type[Exception] = OptionError, *, policy: Any = None,
    length: int = 4, prompt: list[int] = RIGHT, params: SamplingParams = PLAIN, rows: int = 1,
    caches: bool = False,
) -> Refused:  # fmt: skip
    """A run that has to be refused before a pass of its model."""

    def call() -> Any:
        model = ReferenceDenoiser(JOINT)
        model.supports_kv_cache = caches
        given = Prompt(torch.tensor([[0, 3]]), torch.tensor(prompt))
        own, noise = policy or Stepwise(), Noise.from_seed(0, rows)
        try:
            return own.sample(model, given, length, params=params, noise=noise)
        finally:
            assert model.passes == 0

    return Refused(name, call, says=(says,), error=error)


def _uniform_shadow() -> Any:
    model = KVReference(JOINT)
    model.mask_token = None  # type: ignore[assignment]
    return decode(RevisedParallel(), model, 4)


def _ends(ends: list[int] | None, **early: Any) -> Any:
    return lambda: decode(mmaccel.EntropyBounded(**early), ReferenceDenoiser(JOINT), 4, stop=ends)


def _too_long(cache: str) -> Any:
    policy = Stepwise(cache=cache, block=4 if cache == "dual" else None)
    return lambda: run(policy, masked(block=4), 100)


def _forced_mask() -> Any:
    one = torch.ones(1, dtype=torch.int64)
    prompt = Prompt(one[:, None], one, layout=Given([-1, 9]))
    return Canvas(prompt, 2, 9, None, torch.zeros_like(one))


def _masked_lm(
    name: str, says: str, error: type[Exception] = OptionError, /, **given: Any
) -> Refused:
    """A decoder that cannot be a denoiser, or options that it cannot have."""
    model = given.pop("model", "llama")

    def call() -> Any:
        built = build_lm(model) if isinstance(model, str) else model()
        return MaskedLM(built, **{"mask_token": MASK} | given)

    return Refused(name, call, says=(says,), error=error)


def _wrong_filter() -> Any:
    """A run with a filter that was made for blocks of another length."""
    with TemporaryDirectory() as folder:
        file = f"{folder}/filter.safetensors"
        save_file(torch.nn.Sequential(torch.nn.Linear(32, 8)).state_dict(), file)
        return decode(mmaccel.LearnedFilter(file), ReferenceDenoiser(JOINT), 4)


CASES = (
    Refused("a filter of another length", _wrong_filter,
            says=("filter: expected '0.weight' [8, 4]", "4 slots", "[8, 32]", "set block"),
            error=UnsupportedModelError),
    Refused("a filter that is not there",
            lambda: decode(mmaccel.LearnedFilter("no/filter"), ReferenceDenoiser(JOINT), 4),
            says=("filter: expected a file", "no/filter")),
    _sample("no slots", "length: expected an integer >= 1, received 0", length=0),
    _sample("blocks that do not fit", "divides 4 slots, received 3", policy=Stepwise(block=3)),
    _sample("a mask in the prompt", "no mask token, received id 3 in row 0", prompt=[2]),
    _sample("a processor", "expected no processor",
            params=SamplingParams(processor=lambda scores, line, columns: scores)),
    _sample("evenly spread samples", "spread: expected None on a canvas",
            params=SamplingParams(spread=2)),
    _sample("a temperature without a pair", "divergence_temperature: expected 2 branches",
            ShapeError, params=SamplingParams(divergence_temperature=1.0)),
    _sample("noise of three rows", "noise: expected 1 rows, received 3", ShapeError, rows=3),
    _sample("no cache", 'choose cache="none"', UnsupportedModelError,
            policy=Stepwise(cache="dual")),
    _sample("no cache for shadows", 'revise="edit"', UnsupportedModelError,
            policy=RevisedParallel()),
    _sample("no blocks", "block-causal model", policy=Stepwise(cache="block"), caches=True),
    _sample("no blocks of parts", "block-causal model for kind 'sub-block'",
            policy=Stepwise(cache="sub-block"), caches=True),
    Refused("a far field of sub-blocks", lambda: mmaccel.CachePlan("sub-block", far=4),
            says=("cache: expected no far", "received 4")),
    _sample("one branch", "expected 2 branches", ShapeError,
            params=SamplingParams(guidance_scale=2.0)),
    Refused("a window policy", lambda: decode(mmaccel.Jacobi(), ReferenceDenoiser(JOINT), 4),
            says=("fills a canvas for a ReferenceDenoiser",)),
    *(Refused(f"{type(policy).__name__} for a token model",
              lambda policy=policy: decode(policy, ToyLanguage(3), 4),
              says=("token after token for a ToyLanguage",))
      for policy in (Stepwise(), mmaccel.AdaptiveBlock((1,)), RevisedParallel(), LosslessUnmask())),
    Refused(
        "shadows that cannot be kept",
        lambda: decode(RevisedParallel(), ReferenceDenoiser(JOINT), 4),
        says=("can be kept",),
        error=UnsupportedModelError,
    ),
    Refused("shadows without a mask token", _uniform_shadow,
            says=("expected a model with a mask token for 'shadow'",)),
    *(Refused(f"early ends of {ends}, {early}", _ends(ends, **early),
              says=("drop_suffix: expected a prompt with stop tokens",))
      for ends in (None, [98, 99]) for early in ({"end_threshold": 0.9}, {"drop_suffix": True})),
    *(Refused(f"a canvas too long, cache={cache}", _too_long(cache),
              says=("at most 96 positions", "received 105"))
      for cache in ("none", "dual", "block")),
    Refused("a layout that forces the mask token", _forced_mask,
            says=("mask token 9 in a forced slot",)),
    Refused(
        "blocks that depend on later ones",
        lambda: decode(Stepwise(cache="block"), Blocks("reads"), 12),
        says=("depend on no later block", "a Blocks whose first block"),
        error=UnsupportedModelError,
    ),
    _masked_lm("sliding windows", "sliding windows", UnsupportedModelError, model="mistral"),
    _masked_lm("recurrent layers", "layers of other kinds", UnsupportedModelError, model="lfm2"),
    _masked_lm("no weights", "no weights", UnsupportedModelError,
               model=lambda: build_lm("llama").to("meta")),
    _masked_lm("a mask beyond the ids", "mask_token: expected an id in 0..39", mask_token=40),
    _masked_lm("a shift of 2", "shift: expected 0 or 1", shift=2),
    _masked_lm("a block of 0", "block: expected an integer >= 1", block=0),
    _masked_lm("too many ids", "vocab_size: expected 1..40", vocab_size=41),
    _masked_lm("dropout", "call model.eval",
               model=lambda: build_lm("llama", attention_dropout=0.5).train()),
)  # fmt: skip
