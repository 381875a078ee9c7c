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
from tests.fixtures.canvas import MASK, decode, masked, run
from tests.fixtures.joints import families
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
        if caches:
            model.offers = model.offers | {"kept entries"}
        given = Prompt(torch.tensor([[0, 3]]), torch.tensor(prompt))
        own, noise = policy or Stepwise(), Noise.from_seed(0, rows)
        try:
            return own.sample(model, given, length, params=params, noise=noise)
        finally:
            assert model.passes == 0

    return Refused(name, call, says=(says,), error=error)


def _too_long(cache: str) -> Any:
    policy = Stepwise(cache=cache, block=4 if cache == "dual" else None)
    return lambda: run(policy, masked(block=4), 100)


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
    _sample("no slots", "length: expected an integer >= 1, received 0", length=0),
    _sample("blocks that do not fit", "divides 4 slots, received 3", policy=Stepwise(block=3)),
    _sample("a mask in the prompt", "no mask token, received id 3 in row 0", prompt=[2]),
    _sample("a processor", "expected no processor",
            params=SamplingParams(processor=lambda scores, line, columns: scores)),
    _sample("a temperature without a pair", "divergence_temperature: expected 2 branches",
            ShapeError, params=SamplingParams(divergence_temperature=1.0)),
    _sample("noise of three rows", "noise: expected 1 rows, received 3", ShapeError, rows=3),
    _sample("no cache", 'choose cache="none"', UnsupportedModelError,
            policy=Stepwise(cache="dual")),
    _sample("no blocks", "block-causal model", policy=Stepwise(cache="block"), caches=True),
    _sample("one branch", "expected 2 branches", ShapeError,
            params=SamplingParams(guidance_scale=2.0)),
    Refused("a window policy", lambda: decode(mmaccel.Jacobi(), ReferenceDenoiser(JOINT), 4),
            says=("fills a canvas for a ReferenceDenoiser",)),
    *(Refused(f"{type(policy).__name__} for a token model",
              lambda policy=policy: decode(policy, ToyLanguage(3), 4),
              says=("token after token for a ToyLanguage",))
      for policy in (Stepwise(), mmaccel.AdaptiveBlock((1,)), RevisedParallel(), LosslessUnmask())),
    *(Refused(f"a canvas too long, cache={cache}", _too_long(cache),
              says=("at most 96 positions", "received 105"))
      for cache in ("none", "dual", "block")),
    _masked_lm("sliding windows", "sliding windows", UnsupportedModelError, model="mistral"),
    _masked_lm("a mask beyond the ids", "mask_token: expected an id in 0..39", mask_token=40),
)  # fmt: skip
