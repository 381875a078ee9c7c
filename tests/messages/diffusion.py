"""Canvas policies: arguments of calls, and models and policies that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import BusyError, NumericsError, OptionError, ShapeError, UnsupportedModelError
from mmaccel.pipelines.diffusion_lm.arguments import DENOISER
from mmaccel.pipelines.diffusion_lm.masked_lm import MaskedLM
from mmaccel.pipelines.diffusion_lm.models import LLaDADenoiser, SDARDenoiser
from mmaccel.samplers.canvas.stepwise import Stepwise
from tests.fixtures import amused, diffusion_gemma
from tests.fixtures.canvas import run
from tests.fixtures.denoiser_targets import LENGTH, MASK, PADDED, TARGETS, VOCAB, images, llada
from tests.fixtures.denoisers import TinyDream, TinyLLaDA, TinyLumina
from tests.fixtures.sdar import TinySDAR
from tests.fixtures.tiny_lms import build_lm, left_padded
from tests.messages.case import Refused

Call = Callable[[], Any]
ROWS = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 1]])}
ONE = {"input_ids": torch.tensor([[5, 6, 7]])}
IDS = torch.arange(3, 17).view(2, 7)
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


def _infinite() -> Tensor:
    return torch.tensor([[float("-inf"), 0, 0], [0, 0, 0]])


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
        ("a penalty in a configuration", {"generation_config": _PENALTY}, ("no prefix",)),
        ("a dict for a configuration", {"generation_config": {"max_new_tokens": 3}},
         ("received a dict",)),
        ("a tensor for a configuration", {"generation_config": torch.ones(2, 3)},
         ("received a Tensor",)),
        ("two lengths", {"gen_length": 4}, ("two names of one number",)),
        ("no length", {"max_new_tokens": None}, ("how many tokens",)),
        ("length 0", {"max_new_tokens": 0}, ("at least 1 token",)),
        ("length 2.0", {"max_new_tokens": 2.0}, ("at least 1 token",)),
        ("a short max_length", {"max_new_tokens": None, "max_length": 3}, ("with 3 columns",)),
        ("temperature -1", {"temperature": -1.0}, ("temperature",)),
        ("top_p 1.5", {"top_p": 1.5}, ("top_p",)),
        ("an end in letters", {"eos_token_id": "a"}, ("expected ids",)),
        ("the mask as an end", {"eos_token_id": [3, MASK]},
         ("eos_token_id: ", "received 39, the mask token")),
        ("the mask in a prompt", {"input_ids": _spoiled(MASK)},
         ("input_ids: ", "no mask token", "in row 1")),
        ("id -2", {"input_ids": _spoiled(-2)}, ("input_ids: ", "from 0 on", "id -2 in row 1")),
        ("id 40", {"input_ids": _spoiled(VOCAB)}, ("input_ids: ", "below 40", "id 40 in row 1")),
        ("a mask of -inf", {"attention_mask": _infinite()},
         ("attention_mask: expected 1 on tokens and 0 on padding, received -inf",)),
        ("a mask of NaN", {"attention_mask": torch.tensor([[1, float("nan"), 1]] * 2)},
         ("received nan",)),
        ("the mask in a negative prompt", ONE | negative({"input_ids": torch.tensor([[MASK]])}),
         ("negative_prompt_ids: ", "no mask token", "in row 0")),
        ("id -1 in a negative prompt", negative({"input_ids": _spoiled(-1)}),
         ("negative_prompt_ids: ", "id -1 in row 1")),
        ("id 200 in uint8", negative({"input_ids": _spoiled(200).to(torch.uint8)}),
         ("id 200 in row 1",)),
        ("a negative mask of 2", negative(ROWS | {"attention_mask": torch.full((2, 3), 2)}),
         ("negative_prompt_attention_mask: ", "received 2")),
        ("a negative mask alone", {"negative_prompt_attention_mask": torch.ones(2, 3)},
         ("expected negative_prompt_ids with it",)),
        ("a scale alone", negative({}), ("expected negative_prompt_ids with it",)),
        ("scale 0 alone", negative({}, guidance_scale=0), ("received 0 alone",)),
        ("a negative prompt alone", negative(ROWS, guidance_scale=None),
         ("guidance_scale other than 1 with it",)),
        ("a negative prompt at scale 1", negative(ROWS, guidance_scale=1.0),
         ("guidance_scale other than 1 with it",)),
        ("scale NaN", negative(ROWS, guidance_scale=float("nan")), ("guidance_scale",)),
        ("a scale in quotes", negative(ROWS, guidance_scale="3"), ("guidance_scale",)),
    )
)  # fmt: skip
_SHAPES = tuple(
    Refused(f"a canvas with {name}", _generate(**options), says, ShapeError)
    for name, options, says in (
        ("ids of one axis", {"input_ids": torch.tensor([5, 6])}, ("B, T",)),
        ("ids in lists", {"input_ids": [[5, 6]]}, ("B, T",)),
        ("no columns", {"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, ("B, T",)),
        ("a mask of other rows", {"attention_mask": torch.ones(1, 4)}, ("attention_mask",)),
        ("a row of padding", {"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])},
         ("input_ids: ", "at least one token", "row 1 by attention_mask")),
        ("negative ids of one axis", negative({"input_ids": torch.ones(3)}),
         ("negative_prompt_ids: expected int64",)),
        ("three negative prompts", negative({"input_ids": torch.ones(3, 2, dtype=torch.int64)}),
         ("expected 2 rows or one for all, received 3",)),
        ("a negative row of padding",
         negative(ROWS | {"attention_mask": torch.tensor([[0, 0, 0], [1, 0, 0]])}),
         ("negative_prompt_ids: ", "at least one token",
          "row 0 by negative_prompt_attention_mask")),
        ("a negative mask of other rows", negative(ROWS | {"attention_mask": torch.ones(3, 2)}),
         ("negative_prompt_att",)),
    )
)  # fmt: skip
_SIGNATURE = tuple(
    Refused(f"a canvas with {name}", _generate(**options), says, TypeError)
    for name, options, says in (
        ("an unknown argument", {"no_such": None}, ("unexpected keyword argument 'no_such'",)),
        ("two names of ids", {"inputs": IDS}, ("received both",)),
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
_narrow = _serve(lambda: llada(max_sequence_length=13))
_ends = mmaccel.EntropyBounded(0.0, end_threshold=0.5)
_CALLS = (
    Refused("the mask token among words", _mmada(
        lambda model: model.generate(_ids(5, MASK), max_new_tokens=2)), ("id 39 in row 0",)),
    Refused("an id beyond words and codes", _mmada(
        lambda model: model.generate(_ids(5, 40), max_new_tokens=2)), ("below 40",)),
    Refused("images that end with the mask token", _mmada(
        lambda model: model.generate(_ids(5), max_new_tokens=2, eos_token_id=MASK)),
        ("the mask token",)),
    Refused("more positions than the model has", _narrow(
        lambda model: model.generate(torch.ones(1, 8, dtype=torch.int64), max_new_tokens=LENGTH)),
        ("at most 13 positions",)),
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


def _blocks() -> Any:
    return MaskedLM(build_lm("qwen3").double(), MASK, block=4)


def _uniform() -> Any:
    return MaskedLM(build_lm("llama").double(), None)


def _small_grid(vocab_size: int = 9) -> Any:
    return mmaccel.Grid(2, 4, vocab_size=vocab_size)


_FITS = tuple(
    Refused(f"a canvas: {name}", call, says, error)
    for name, call, says, error in (
        ("no shadow entries", _attach(llada, "revised-parallel"), ("cache: expected a model",),
         UnsupportedModelError),
        ("no cache of prefixes", _attach(llada, mmaccel.Stepwise(cache="prefix")),
         ("cache: expected a model",), UnsupportedModelError),
        ("no cache of blocks",
         _attach(lambda: LLaDADenoiser(llada()), mmaccel.Stepwise(cache="block")),
         ("cache: expected a model",), UnsupportedModelError),
        ("uniform corruption", _attach(_uniform, "revised-parallel"), ("uniform corruption",),
         OptionError),
        ("delimiters beyond the vocabulary",
         _attach(llada, mmaccel.AdaptiveBlock(delimiters=(VOCAB,))), ("expected ids below 40",),
         OptionError),
        ("delimiters in a block-causal model",
         _attach(_blocks, mmaccel.AdaptiveBlock(delimiters=(5,))), ("attends to everything",),
         UnsupportedModelError),
        ("blocks that do not divide", _attach(_blocks, mmaccel.Stepwise(block=3)),
         ("divides the model's blocks of 4",), OptionError),
        ("a window policy", _attach(llada, "jacobi"), ("offers for a canvas",), OptionError),
        ("an unknown policy", _attach(llada, "entropy"), ("expected one of",), OptionError),
        ("a policy's class", _attach(llada, mmaccel.EntropyBounded), ("make an instance",),
         OptionError),
        ("another pipeline's policy", _attach(llada, "cached-blocks"), ("LLaDA2Pipeline's",),
         OptionError),
        ("graphs", _attach(llada, "stepwise", cuda_graphs=True), ("not captured",), OptionError),
        ("fused", _attach(llada, "stepwise", fused=True), ("the model's own",), OptionError),
        ("a seed in words", _attach(llada, "stepwise", seed="one"), ("seed",), OptionError),
        ("a layout of 3", _attach(llada, "stepwise", layout=3), ("layout",), OptionError),
        ("a layout of 9 ids", _attach(llada, "stepwise", layout=_small_grid()), ("40 ids",),
         OptionError),
        ("no id of the mask",
         _attach(lambda: TinySDAR(VOCAB, model_type="sdar"), mmaccel.EntropyBounded()),
         ("give the denoiser the tokenizer's",), OptionError),
        ("the published id of the mask", _attach(lambda: llada(mask_token_id=None), "stepwise"),
         ("0..39, received 126336",), OptionError),
        ("mask_token=-1", _attach(lambda: llada(mask_token_id=-1), "stepwise"),
         ("0..39, received -1",), OptionError),
        ("dropout", _attach(_dropping, "stepwise"), ("expected evaluation mode",), OptionError),
        ("Lumina under another name",
         _attach(lambda: TinyLumina(VOCAB, **vars(llada().config)), "stepwise"), ("a TypeError",),
         UnsupportedModelError),
        ("Dream under another name",
         _attach(lambda: TinyDream(VOCAB, **vars(llada().config)), "stepwise"), ("a TypeError",),
         UnsupportedModelError),
    )
)  # fmt: skip


_DENOISERS = (
    Refused("a denoiser without its mask", lambda: LLaDADenoiser(TinyLLaDA(VOCAB)),
            ("mask_token: expected an id in 0..39, received 126336",)),
    Refused("SDAR without its mask", lambda: SDARDenoiser(TinySDAR(VOCAB, block_size=4)),
            ("configuration has no mask_token_id",)),
    Refused("images beyond the vocabulary",
            lambda: LLaDADenoiser(TinyLLaDA(VOCAB), MASK, images=(30, 11)), ("within 40 ids",)),
    Refused("blocks of 0", lambda: SDARDenoiser(TinySDAR(VOCAB), MASK, block=0),
            ("block: expected an integer",)),
    Refused("60 slots of 64 positions", lambda: run(
        Stepwise(), LLaDADenoiser(TinyLLaDA(VOCAB, max_sequence_length=64), MASK), 60),
        ("length: expected at most 64 positions",)),
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


def _change(step: int, left: Tensor, latents: Tensor) -> None:
    latents[latents == amused.MASK] = 3  # in the pipeline's own loop these would stay


def _broken_amused() -> Any:
    pipe = amused.build_pipe()
    torch.nn.init.constant_(pipe.transformer.mlm_layer.conv2.weight, float("nan"))
    with mmaccel.attach(pipe, "stepwise", seed=1):
        return pipe("abc", **LATENT)


_generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
_AMUSED = (
    Refused("aMUSEd with a cache",
            lambda: mmaccel.attach(_pipe(), mmaccel.Stepwise(cache="prefix")),
            ("without a cache",)),
    Refused("aMUSEd with a layout of 9 ids",
            lambda: mmaccel.attach(_pipe(), "stepwise", layout=_small_grid()), ("32 ids",)),
    *(
        Refused(f"aMUSEd with shadow entries of {type(policy).__name__}",
                lambda policy=policy: mmaccel.attach(_pipe(), policy),
                ("which has no KV cache", "edit", "redo"))
        for policy in (mmaccel.RevisedParallel(), mmaccel.LosslessUnmask(2, layout="entries"))
    ),
    Refused("one seed for two images", _paint(prompt=["abc", "x"], seed=[1]), ("seed",)),
    *(
        Refused(f"{steps} steps of aMUSEd", _paint(num_inference_steps=steps),
                ("num_inference_steps",))
        for steps in (0, True, 2.5)
    ),
    Refused("steps under Stepwise", _paint(num_inference_steps=12),
            ("none under Stepwise", " 12; ", "MaskedParallel")),
    Refused("two generators", _paint(prompt=["abc", "x"], generator=_generators),
            ("expected one torch.Generator, received a list",)),
    Refused("a callback that changes latents", lambda: _call_amused(callback=_change),
            ("expected latents as it was given", "latents=")),
    *(
        Refused(f"latents of {name}", _paint(latents=latents), ("latents: expected", *said),
                ShapeError)
        for name, latents, said in (
            ("another shape", torch.zeros(1, 4, 3).long(), ("[1, 4, 4] of int", "[1, 4, 3]")),
            ("floats", torch.zeros(1, 4, 4), ("[1, 4, 4] of int", "torch.float32")),
            ("no tokens", torch.full((1, 4, 4), 1000), ("0..", "received 1000..1000")),
        )
    ),
    Refused("aMUSEd inside aMUSEd", lambda: _call_amused(callback=lambda *_: _pipe()("abc")),
            ("one call at a time",), BusyError),
    Refused("NaN of aMUSEd", _broken_amused, (), NumericsError),
)  # fmt: skip


def _call_amused(**options: Any) -> Any:
    with mmaccel.attach(_pipe(), "stepwise"):
        return _pipe()("abc", **LATENT, **options)


# ------------------------------------------------------------------------------ DiffusionGemma


def _gemma(policy: Any = "stepwise", **options: Any) -> Call:
    """A call of DiffusionGemma under a policy."""

    def call() -> Any:
        model = diffusion_gemma.build_model()
        with mmaccel.attach(model, policy, **options):
            return model.generate(IDS)

    return call


def _gemma_pipe(callback: Any) -> Call:
    def call() -> Any:
        pipe = diffusion_gemma.build_pipe()
        with mmaccel.attach(pipe, mmaccel.EntropyBounded(gamma=1000.0), seed=1, strict=True):
            return pipe(prompt="abc", gen_length=8, callback_on_step_end=callback)

    return call


def _write(pipe: Any, step: int, inner: int, tensors: dict[str, Any]) -> None:
    tensors["canvas"] += 1


def _interrupt(pipe: Any, step: int, inner: int, tensors: dict[str, Any]) -> Any:
    pipe._interrupt = True
    return tensors


def _broken_gemma() -> Any:
    model = diffusion_gemma.build_model()
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    with mmaccel.attach(model, "stepwise", seed=1):
        return model.generate(IDS)


def _begun(**options: Any) -> Call:
    """A call whose first canvas is given."""

    def call() -> Any:
        model = diffusion_gemma.build_model()
        canvas = torch.full((2, diffusion_gemma.CANVAS), 5)
        with mmaccel.attach(model, mmaccel.EntropyBounded(), **options):
            return model.generate(IDS, max_new_tokens=8, decoder_input_ids=canvas)

    return call


_GEMMA = (
    *(
        Refused(f"DiffusionGemma under {policy!r}", _gemma(policy), says)
        for policy, says in (
            (mmaccel.LosslessUnmask(), ("carries the logits",)),
            (mmaccel.Stepwise(cache="prefix"), ("its encoder keeps",)),
            (mmaccel.RevisedParallel(), ()),
            (mmaccel.Stepwise(block=3), ()),
        )
    ),
    Refused("DiffusionGemma's pipeline under drafts",
            lambda: mmaccel.attach(diffusion_gemma.build_pipe(), "lossless-unmask"),
            ("carries the logits",)),
    Refused("DiffusionGemma with a layout of 9 ids", _gemma(layout=_small_grid()), ("41 ids",)),
    Refused("DiffusionGemma with a seed too few", _gemma(seed=[1]), ("seed",)),
    Refused("NaN of DiffusionGemma", _broken_gemma, (), NumericsError),
    Refused("a callback that returns another canvas",
            _gemma_pipe(lambda *given: {"canvas": given[3]["canvas"] + 1}), ("as it was given",)),
    Refused("a callback that writes to the canvas", _gemma_pipe(_write),
            ("canvas as it was given",)),
    Refused("a callback that interrupts", _gemma_pipe(_interrupt), ("_interrupt: expected False",)),
    *(
        Refused(f"a given first canvas, {next(iter(options))}", _begun(**options),
                ("decoder_input_ids",), UnsupportedModelError)
        for options in ({"strict": True}, {"layout": _small_grid(diffusion_gemma.VOCAB)})
    ),
)  # fmt: skip

CASES = (
    *_OPTIONS, *_SHAPES, *_SIGNATURE, *_CALLS, *_FITS, *_DENOISERS, *_AMUSED, *_GEMMA,
)  # fmt: skip
