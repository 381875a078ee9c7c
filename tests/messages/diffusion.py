"""Canvas policies: arguments of calls, and models and policies that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import OptionError, ShapeError, UnsupportedModelError
from mmaccel.pipelines.diffusion_lm.arguments import DENOISER
from mmaccel.pipelines.diffusion_lm.models import LLaDADenoiser
from tests.fixtures import amused, diffusion_gemma
from tests.fixtures.denoiser_targets import LENGTH, MASK, PADDED, TARGETS, VOCAB, images, llada
from tests.fixtures.denoisers import TinyLLaDA, TinyLumina
from tests.fixtures.tiny_lms import left_padded
from tests.messages.case import Refused

Call = Callable[[], Any]
ROWS = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 1]])}
SCALE = 1.7


def negative(inputs: dict[str, Tensor], **options: Any) -> dict[str, Any]:
    """Negative prompts as arguments of a call, with guidance."""
    given = {f"negative_prompt_{name}": value for name, value in inputs.items()}
    given = {name.replace("prompt_input_ids", "prompt_ids"): v for name, v in given.items()}
    return {"guidance_scale": SCALE} | given | options


def _spoiled(value: int) -> Tensor:
    """Two rows with an invalid id in the second one."""
    return torch.tensor([[5, 6, 7], [8, value, 1]])


def _generate(**options: Any) -> Call:
    """A call of a masked model, before its first pass."""

    def call() -> Any:
        model = llada()
        with mmaccel.attach(model, mmaccel.EntropyBounded()) as handle:
            before = model.calls
            try:
                return model.generate(**ROWS | {"max_new_tokens": LENGTH} | options)
            finally:
                assert model.calls == before and handle.history == [], "a pass was made"

    return call


_BEAMS, _PENALTY = SimpleNamespace(num_beams=4), SimpleNamespace(repetition_penalty=1.1)
_OPTIONS = tuple(
    Refused(f"a canvas with {name}", _generate(**options), says)
    for name, options, says in (
        *(
            (name, {name: 8}, (f"{name}: ", row.remedy.format(policy="EntropyBounded")))
            for name, row in DENOISER.items()
            if row.use == "refuse" and name not in ("temperature", "guidance_scale")
        ),
        ("beams in a configuration", {"generation_config": _BEAMS}, ("one canvas a row",)),
        ("no length", {"max_new_tokens": None}, ("a length from the start",)),
        ("the mask as an end", {"eos_token_id": [3, MASK]},
         ("eos_token_id: ", "received 39, the mask token")),
        ("the mask in a prompt", {"input_ids": _spoiled(MASK)},
         ("no mask token", "in row 1")),
        ("a negative prompt at scale 1", negative(ROWS, guidance_scale=1.0),
         ("one other than 1 with negative_prompt_ids",)),
    )
)  # fmt: skip
_SHAPES = tuple(
    Refused(f"a canvas with {name}", _generate(**options), says, ShapeError)
    for name, options, says in (
        ("ids of one axis", {"input_ids": torch.tensor([5, 6])}, ("B, T",)),
    )
)  # fmt: skip
_SIGNATURE = tuple(
    Refused(f"a canvas with {name}", _generate(**options), says, TypeError)
    for name, options, says in (
        ("an unknown argument", {"no_such": None}, ("unexpected keyword argument 'no_such'",)),
        ("no ids", {"input_ids": None}, ("received neither",)),
    )
)


def _serve(target: Callable[[], Any], policy: Any = "stepwise", **options: Any) -> Any:
    """A call of another model, as `serve(model)`, under a policy."""

    def with_call(call: Callable[[Any], Any]) -> Call:
        def run_it() -> Any:
            made = target()
            with mmaccel.attach(made, policy, **options):
                return call(made)

        return run_it

    return with_call


def _ids(*row: int) -> Tensor:
    return torch.tensor([row])


_mmada = _serve(lambda: images("mmada"))
_ends = mmaccel.EntropyBounded(0.0, end_threshold=0.5)
_CALLS = (
    Refused("the mask token among words", _mmada(
        lambda model: model.generate(_ids(5, MASK), max_new_tokens=2)), ("id 39 in row 0",)),
    Refused("early ends without end tokens", _serve(llada, _ends)(
        lambda model: model.generate(_ids(5, 9, 7), max_new_tokens=LENGTH)),
        ("expected a prompt with stop tokens",)),
    Refused("prompts that end elsewhere in a block", _serve(TARGETS["sdar"])(
        lambda model: model.generate(**PADDED, max_new_tokens=LENGTH, temperature=1.0,
                                     **negative(left_padded([[9, 2], [1, 2], [3, 4]])))),
        ("end alike in the model's blocks of 4",)),
)  # fmt: skip


# ------------------------------------------------------------------------------ attaching


def _attach(target: Callable[[], Any], policy: Any, **options: Any) -> Call:
    """Attaching to a model, which stays without a `generate`."""

    def call() -> Any:
        made = target()
        try:
            return mmaccel.attach(made, policy, **options)
        finally:
            assert not hasattr(made, "generate")

    return call


def _dropping() -> Any:
    model = llada()
    model.dropout = torch.nn.Dropout(0.1).train()
    return model


def _small_grid(vocab_size: int = 9) -> Any:
    return mmaccel.Grid(2, 4, vocab_size=vocab_size)


_FITS = tuple(
    Refused(f"a canvas: {name}", call, says, error)
    for name, call, says, error in (
        ("no shadow entries", _attach(llada, "revised-parallel"), ('revise="edit"',),
         UnsupportedModelError),
        ("another pipeline's policy", _attach(llada, "cached-blocks"), ("LLaDA2Pipeline's",),
         UnsupportedModelError),
        ("graphs", _attach(llada, "stepwise", cuda_graphs=True), ("filled pass by pass",),
         UnsupportedModelError),
        ("a layout of 9 ids", _attach(llada, "stepwise", layout=_small_grid()), ("40 ids",),
         OptionError),
        ("dropout", _attach(_dropping, "stepwise"), ("expected evaluation mode",), OptionError),
        ("Lumina under another name",
         _attach(lambda: TinyLumina(VOCAB, **vars(llada().config)), "stepwise"), ("a TypeError",),
         UnsupportedModelError),
    )
)  # fmt: skip


_DENOISERS = (
    Refused("a denoiser without its mask", lambda: LLaDADenoiser(TinyLLaDA(VOCAB)),
            ("mask_token: expected an id in 0..39, received 126336",)),
)  # fmt: skip


# ------------------------------------------------------------------------------ aMUSEd


@cache
def _pipe() -> Any:
    return amused.build_pipe()


LATENT: dict[str, Any] = {"output_type": "latent", "guidance_scale": 3.0}


def _paint(policy: Any = "stepwise", prompt: Any = "abc", seed: Any = None, **options: Any) -> Call:
    """A call of aMUSEd that is refused before a pass."""

    def call() -> Any:
        pipe = _pipe()
        with mmaccel.attach(pipe, policy, seed=seed):
            pipe.seen.clear()
            try:
                return pipe(prompt, **LATENT | options)
            finally:
                assert not pipe.seen, "a pass was made"

    return call


_AMUSED = (
    Refused("steps under Stepwise", _paint(num_inference_steps=12),
            ("none under Stepwise", " 12; ", "MaskedParallel")),
    *(
        Refused(f"latents of {name}", _paint(latents=latents), ("latents: expected", *said),
                ShapeError)
        for name, latents, said in (
            ("another shape", torch.zeros(1, 4, 3).long(), ("[1, 4, 4] of int", "[1, 4, 3]")),
            ("no tokens", torch.full((1, 4, 4), 1000), ("0..", "received 1000..1000")),
        )
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------ DiffusionGemma


def _gemma_pipe(callback: Any) -> Call:
    def call() -> Any:
        pipe = diffusion_gemma.build_pipe()
        with mmaccel.attach(pipe, mmaccel.EntropyBounded(gamma=1000.0), seed=1, strict=True):
            return pipe(prompt="abc", gen_length=8, callback_on_step_end=callback)

    return call


_GEMMA = (
    Refused("a callback that returns another canvas",
            _gemma_pipe(lambda *given: {"canvas": given[3]["canvas"] + 1}), ("as it was given",)),
)  # fmt: skip

CASES = (
    *_OPTIONS, *_SHAPES, *_SIGNATURE, *_CALLS, *_FITS, *_DENOISERS, *_AMUSED, *_GEMMA,
)  # fmt: skip
