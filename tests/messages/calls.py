"""Calls that users make: `attach` and `generate`, pipelines, policies, methods of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from torch import nn

import mmaccel
from mmaccel import ImageToText, Jacobi, Noise, SamplingParams, TextToImage, TextToSpeech
from mmaccel.demo.scenes_vqa.processor import make_processor
from mmaccel.errors import (
    AttachError,
    MissingBackendError,
    NumericsError,
    ShapeError,
    UnsupportedModelError,
)
from mmaccel.pipelines.hosts.diffusion_lm.arguments import DENOISER
from mmaccel.reduction.kv_cache.knorm import KNorm
from mmaccel.reduction.sparse_attention.quest import Quest
from mmaccel.reduction.visual_tokens.context import make_context
from mmaccel.samplers.canvas.policy import SelectorPolicy
from mmaccel.samplers.canvas.selector import AtLeast, Selector
from mmaccel.samplers.drafting.contract import Drafts, DraftSource
from tests.fixtures.denoiser_targets import LENGTH, MASK, VOCAB, llada
from tests.fixtures.fused_lms import build_decoder
from tests.fixtures.media import image
from tests.fixtures.shared import image_pipe, media_pipe, new_folder, reading_pipe
from tests.fixtures.speech import SECONDS
from tests.fixtures.tiny_lms import PROMPTS, build_lm, shared_lm
from tests.fixtures.tiny_model import CAPTIONS, build_tiny_clips, masked_beside_plain
from tests.fixtures.tiny_vlms import build_vlm, encodes_first, shared_vlm
from tests.fixtures.tiny_vqa import build_vqa, scene
from tests.fixtures.toy_models import ToyLanguage, make_prompt
from tests.fixtures.voices import build_voices
from tests.messages.refused import Refused, table

Call = Callable[..., Any]
_NO = UnsupportedModelError

# --- attach to a language model -------------------------------------------------------------------

_SHORT: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
_NINE = Jacobi(window=9)
_FRAMES = mmaccel.Frames(((4, 12),), vocab_size=40)
_COMB = mmaccel.Comb(branches=3, length=4)


def language_model(name: str = "llama") -> Call:
    """A model that is built, attached to and called."""

    def attach(policy: Any = "jacobi", **options: Any) -> Any:
        model = build_lm(name) if name in ("llama", "mistral", "gpt2") else build_decoder(name)
        try:
            with mmaccel.attach(model, policy, **options):
                model.generate(**PROMPTS, **_SHORT)
        finally:
            assert "_sample" not in vars(model)

    return attach


ATTACHED = [
    *table(
        language_model,
        ({"policy": Jacobi}, "policy: expected", {"policy": Jacobi()}),
        ({"seed": 1.5}, "seed: expected", {"seed": 1}),
        ({"strict": "no"}, "strict: expected one of True, False, received", {"strict": False}),
        ({"layout": mmaccel.Frames(((4, 12),), 41)}, "the model's 40 ids", {"layout": _FRAMES}),
        (
            {"policy": Jacobi(window=4, drafts="above")},
            "or give a layout",
            {"layout": mmaccel.Grid(2, 2, 40)},
        ),
        ({"kv_cache": mmaccel.Quest()}, "Quest goes into attention=",
         {"kv_cache": None, "attention": mmaccel.Quest()}),
        ({"kv_cache": mmaccel.TOVA(every=8), "policy": _NINE}, "at most 8 … window=9 … narrower",
         {"policy": Jacobi(window=8)}),
        ({"prompt_tokens": mmaccel.ILRe(keep=0.5, layer=2)}, "ILRe: layer … in 1..1, received 2",
         {"prompt_tokens": mmaccel.ILRe(keep=0.5, layer=1)}),
        ({"prompt_tokens": mmaccel.LazyLLM(keep=0.5), "kv_cache": mmaccel.SnapKV()},
         "beside LazyLLM … leave kv_cache or prompt_tokens out", {"kv_cache": None}),
        ({"cuda_graphs": True}, "a model on a CUDA", {"cuda_graphs": False}, MissingBackendError),
        ({"fused": False, "compile": True}, "the fused decoder", {"compile": False}),
        ({"visual_tokens": mmaccel.RandomTokens(keep=0.5)}, "expected a vision-language",
         {"visual_tokens": None}, _NO),
        (
            {"policy": mmaccel.Speculative(4, build_lm("llama", vocab_size=39)), "strict": True},
            "a vocabulary of 40, received 39 … mmaccel.share_ids",
            {"policy": mmaccel.Speculative(4, build_lm("llama"))},
        ),
        ({"policy": Jacobi(4, "mtp"), "strict": True}, "num_mtp_layers … another source",
         {"policy": Jacobi(4, "left")}),
        ({"policy": mmaccel.EntropyBounded()}, "canvas", {"policy": "jacobi"}),
    ),
    *table(
        language_model,
        ({"kv_cache": "snapkv"}, "the last 5 positions alone", {"kv_cache": None}, _NO),
        of="mistral",
    ),
    *table(
        language_model,
        ({"kv_cache": mmaccel.StreamingLLM(budget=64, rerotate=True)},
         "learned … leave rerotate out", {"kv_cache": mmaccel.StreamingLLM(budget=64)}, _NO),
        ({"prompt_tokens": "ilre"}, "no list of its layers … leave prompt_tokens out",
         {"prompt_tokens": None}, _NO),
        of="gpt2",
    ),
    *table(
        language_model,
        ({"fused": True}, "fused=True … set fused='auto'", {"fused": "auto"}, _NO),
        of="olmo",
    ),
]  # fmt: skip


def generating(options: dict[str, Any]) -> Call:
    """`generate` of an attached language model."""
    model = build_lm("llama")
    mmaccel.attach(model, "jacobi", **options)
    return partial(model.generate, **PROMPTS, **_SHORT)


def training() -> Call:
    """With dropout in one layer; `evaluates` is whether the model is told that training ended."""
    model = build_lm("llama")
    model.model.layers[0].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5))
    mmaccel.attach(model, "jacobi", strict=True)

    def generate(evaluates: bool) -> Any:
        return model.train(not evaluates).generate(**PROMPTS, **_SHORT)

    return generate


def entering_a_handle() -> Call:
    """So many times; a handle serves once."""

    def enter(times: int) -> None:
        handle = mmaccel.attach(build_lm("llama"), "jacobi")
        for _ in range(times):
            with handle:
                pass

    return enter


def targets() -> Call:
    return lambda target: mmaccel.attach(target(), "jacobi").detach()


def _pipeline(**parts: Any) -> Call:
    return lambda: SimpleNamespace(components=parts, **parts)


STRICT = [
    *table(
        generating,
        ({"output_hidden_states": True, "use_cache": False, "return_dict_in_generate": True},
         "without a cache", {"use_cache": True}),
        ({"num_beams": 3}, "received beam search; leave that out", {"num_beams": 1}),
        ({"custom_generate": lambda model, ids, *_, **__: ids}, "custom_generate",
         {"custom_generate": None}),
        error=AttachError, of={"strict": True},
    ),
    *table(training, ({"evaluates": False}, "training mode with dropout", {"evaluates": True}),
           error=AttachError),
    *table(entering_a_handle, ({"times": 2}, "call mmaccel.attach again", {"times": 1}),
           error=AttachError),
    *table(
        targets,
        ({"target": lambda: shared_lm("llama").model}, "AutoModelForCausalLM",
         {"target": lambda: shared_lm("llama")}),
        ({"target": _pipeline(vae=nn.Linear(1, 1))}, "none of whose passes", None),
        ({"target": _pipeline(one=shared_lm("llama"), two=shared_lm("gpt2"))}, "with one, two",
         None),
        ({"target": object}, "a transformers model that generates, received a object", None),
        ({"target": lambda: image_pipe("words")}, "to its call: pipe(..., policy=policy)", None),
        error=_NO,
    ),
]  # fmt: skip

# --- masked models --------------------------------------------------------------------------------

_ROWS = torch.tensor([[5, 6, 7], [8, 9, 1]])


def canvas() -> Call:
    model = llada()
    mmaccel.attach(model, mmaccel.EntropyBounded())
    return partial(model.generate, input_ids=_ROWS, max_new_tokens=LENGTH)


def masked_model() -> Call:
    def attach(policy: Any = "stepwise", **options: Any) -> None:
        model = llada()
        with mmaccel.attach(model, policy, **options):
            model.generate(input_ids=_ROWS, max_new_tokens=LENGTH)

    return attach


MASKED = [
    *table(
        canvas,
        *(
            ({name: 8}, f"{name}:  … {row.remedy.format(policy='EntropyBounded')}", {name: None})
            for name, row in DENOISER.items()
            if row.use == "refuse" and name not in ("temperature", "guidance_scale")
        ),
        ({"max_new_tokens": None}, "a length from the start", {"max_new_tokens": 4}),
        ({"eos_token_id": [3, MASK]}, "received 39, the mask token", {"eos_token_id": [3]}),
        ({"input_ids": torch.tensor([[5, MASK]])}, "no mask token … in row 0",
         {"input_ids": torch.tensor([[5, 6]])}),
        ({"input_ids": torch.tensor([[5, VOCAB]])}, "expected 0..39, received 5..40",
         {"input_ids": torch.tensor([[5, 6]])}, ShapeError),
        ({"negative_prompt_ids": _ROWS, "guidance_scale": 1.0}, "other than 1 with negative",
         {"guidance_scale": 1.7}),
        ({"input_ids": torch.tensor([5, 6])}, "B, T", {"input_ids": _ROWS}, ShapeError),
        ({"no_such": None}, "unexpected keyword argument 'no_such'", None, TypeError),
        before_passes=True,
    ),
    *table(
        masked_model,
        ({"policy": "cached-blocks"}, "LLaDA2Pipeline's", {"policy": "stepwise"}, _NO),
        ({"cuda_graphs": True}, "filled pass by pass", {"cuda_graphs": False}, _NO),
        ({"policy": "jacobi"}, "window", {"policy": "stepwise"}),
    ),
]  # fmt: skip

# --- policies and methods -------------------------------------------------------------------------


def sample() -> Call:
    """A run over a model of three tokens."""

    def call(policy: Any, **params: Any) -> Any:
        given = {"params": SamplingParams(**params), "noise": Noise.from_seed(0, 1)}
        return policy.sample(ToyLanguage(3), make_prompt([[1]]), 2, **given)

    return call


def jacobi() -> Call:
    return Jacobi


def methods() -> Call:
    return lambda method, **fields: method(**fields)


CLASSES = [
    *table(
        sample,
        ({"policy": mmaccel.RowParallel(3)}, "rows of an image … SpeculativeJacobi()",
         {"policy": mmaccel.SpeculativeJacobi()}),
        ({"policy": mmaccel.GroupedSpeculative(3, groups="latent")}, "with a code … 'ranks'",
         {"policy": mmaccel.GroupedSpeculative(3, groups="ranks")}),
        ({"policy": mmaccel.AcousticGroups(3, vectors="codes")}, "with a vector … GroupedSpecul",
         {"policy": mmaccel.GroupedSpeculative(3)}),
        (
            {"policy": Jacobi(8, "token-recycling", _COMB)},
            "do not cache",
            {"policy": Jacobi(8, "token-recycling")},
            _NO,
        ),
        ({"policy": mmaccel.SpeculativeJacobi(3), "spread": 2}, "spread: expected None … Jacobi()",
         {"policy": Jacobi(3)}),
        ({"policy": mmaccel.Stepwise()}, "token after token for a ToyLanguage",
         {"policy": Jacobi(3)}),
    ),
    *table(
        jacobi,
        ({"window": 32, "tree": _COMB, "drafts": "left"}, "alternatives … token-recycling",
         {"drafts": "token-recycling"}),
        ({"window": 8, "tree": mmaccel.Comb(3, 8), "drafts": "coarse"}, "window … shorter branches",
         {"tree": mmaccel.Comb(3, 2)}),
        ({"window": "adaptive", "tree": _COMB, "drafts": "coarse"}, "window … adaptive",
         {"window": 32}),
    ),
    *table(
        methods,
        ({"method": mmaccel.SpeculativeJacobi, "drafts": "online"}, "no fixed noise … Jacobi()",
         {"drafts": "auto"}),
        ({"method": mmaccel.SpeculativeJacobi, "verification": "block"}, "coupling='independent'",
         {"coupling": "independent"}),
        ({"method": mmaccel.Speculative, "draft_model": [1]}, "AutoModelForCausalLM.from_pretrain",
         {"draft_model": build_lm("llama")}),
        ({"method": mmaccel.QuantizedCache, "over": mmaccel.TOVA(every=8)}, "every out",
         {"over": mmaccel.TOVA()}),
        ({"method": mmaccel.StreamingLLM, "rerotate": True, "every": 64}, "rerotate=True",
         {"rerotate": False}),
        ({"method": mmaccel.DART, "keep": 0.5, "n_keep": 3}, "received 0.5 and 3",
         {"keep": None}),
        ({"method": mmaccel.Pard, "model": build_lm("llama")}, "give mask_token=",
         {"mask_token": 39}),
        ({"method": mmaccel.KVzap, "scorer": "nvidia/KVzap-mlp-Qwen3-8B"}, "a file … download",
         None),
    ),
]  # fmt: skip

# --- methods of users -----------------------------------------------------------------------------


def _own(base: type, method: str, change: Callable[[Any], Any], **fields: Any) -> Any:
    """A child of a class, whose method answers something else."""

    def answer(self: Any, *given: Any) -> Any:
        return change(getattr(base, method)(self, *given))

    return dataclass(frozen=True)(type("Own", (base,), {method: answer}))(**fields)


class Source(DraftSource):
    """Drafts that a case gives it."""

    def __init__(self, drafts: Callable[[int, int], Any]) -> None:
        self.drafts = drafts

    def propose(self, frontier: Any) -> Any:
        return self.drafts(*frontier.slots.shape)


def plan_tokens() -> Call:
    """The plan of a reducer of six visual tokens."""

    def plan(scores: Any) -> Any:
        method = _own(mmaccel.RandomTokens, "score", lambda _: scores, n_keep=2)
        return method.plan(make_context(torch.zeros(2, 6, 4)))

    return plan


def fill_canvas() -> Call:
    """A pass by a selector."""

    class Own(Selector):
        def __init__(self, change: Callable[[Any], Any]) -> None:
            self.change = change

        def select(self, predictions: Any, state: Any) -> Any:
            return self.change(predictions.is_open & (predictions.entropy < 0))

    @dataclass(frozen=True)
    class Policy(SelectorPolicy):
        change: Any

        def selector(self, run: Any, state: Any) -> Any:
            return AtLeast(1, Own(self.change))

    def generate(change: Any) -> Any:
        model = llada()
        with mmaccel.attach(model, Policy(change)):
            return model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8)

    return generate


_QUEST = {"budget": 0.5, "block": 2, "first_layer": 0}
OWN = [
    *table(
        plan_tokens,
        ({"scores": torch.rand(2, 6, 1)}, "Own.score: expected [2, 6] of float",
         {"scores": torch.rand(2, 6)}),
        error=ShapeError,
    ),
    *table(
        fill_canvas,
        ({"change": lambda found: found[0]}, "Own.select: expected [1, 8] of bool, received [8]",
         {"change": lambda found: found}),
        error=ShapeError,
    ),
]  # fmt: skip
OWN += table(
    language_model,
    ({"kv_cache": _own(KNorm, "score", lambda x: x * float("nan"), budget=2), "strict": True},
     "Own.score: expected numbers, received NaN", None, NumericsError),
    ({"attention": _own(Quest, "summarise", lambda x: x[:, :, 1:], **_QUEST), "strict": True},
     "Own.summarise: expected [", None),
    ({"policy": Jacobi(5, drafts=Source(lambda b, k: Drafts(None, None)))},
     "Source.propose: expected … return Drafts(tokens=", None),
    ({"policy": Jacobi(5, drafts=Source(lambda b, k: Drafts(torch.full((b, k), -1), None)))},
     "Source.propose: expected … received -1", None),
    error=ShapeError,
)  # fmt: skip

# --- vision-language models -----------------------------------------------------------------------


def vision_model(name: str) -> Call:
    def attach(visual_tokens: Any, policy: Any = "jacobi") -> None:
        mmaccel.attach(shared_vlm(name), policy, visual_tokens=visual_tokens).detach()

    return attach


VISION = [
    *table(
        vision_model,
        ({"visual_tokens": [mmaccel.RandomTokens(keep=0.5), mmaccel.UniformTokens(keep=0.5)]},
         "visual_tokens … one method a stage", {"visual_tokens": mmaccel.RandomTokens(keep=0.5)}),
        ({"visual_tokens": {"keep": 0.5}}, "a dictionary with a name",
         {"visual_tokens": {"name": "dart", "keep": 0.5}}),
        of="llava",
    ),
    *(
        row
        for name, method, says, other in (
            ("qwen2_vl", mmaccel.ToMe(keep=0.5), "2 x 2 blocks … FastV", mmaccel.FastV(keep=0.5)),
            ("chameleon", mmaccel.ToMe(keep=0.5), "a VQGAN … FastV", mmaccel.FastV(keep=0.5)),
            ("llava_onevision", mmaccel.FiCoCoV(keep=0.5), "no cls_attention … DivPrune",
             mmaccel.ToMe(keep=0.5)),
        )
        for row in table(
            vision_model, ({"visual_tokens": method}, says, {"visual_tokens": other}),
            error=_NO, of=name,
        )
    ),
]  # fmt: skip


def released_model() -> Call:
    """Of a transformers that encodes images in its first pass."""
    return lambda method: mmaccel.attach(build_vlm("llava"), "jacobi", visual_tokens=method)


if not encodes_first():
    VISION = table(
        released_model,
        ({"method": mmaccel.DivPrune(keep=0.5)}, "install transformers 5.23", None),
        error=_NO,
    )

# --- pipelines ------------------------------------------------------------------------------------


@cache
def _masked_images() -> Any:
    return TextToImage.from_pretrained(masked_beside_plain(new_folder("masked"))[0])


@cache
def _voices() -> Any:
    return TextToSpeech.from_pretrained(build_voices(new_folder("voices")))


@cache
def _clips() -> Any:
    return mmaccel.TextToVideo.from_pretrained(build_tiny_clips(new_folder("clips")))


@cache
def _reader() -> ImageToText:
    return ImageToText(build_vqa(), make_processor())


def draw(family: str) -> Call:
    pipe = _masked_images() if family == "masked" else image_pipe(family)
    return partial(pipe, prompt=CAPTIONS[0], seed=0)


def serve() -> Call:
    pipe = image_pipe("words")
    return partial(pipe.serve, params=pipe.image_model.params, deliver=lambda output: None)


def say(family: str) -> Call:
    return partial(media_pipe(family), text="a red fox", max_seconds=SECONDS[family])


def say_by_voices() -> Call:
    return partial(_voices(), text="red", max_seconds=0.1)


def continue_clip() -> Call:
    return partial(media_pipe("cosmos"), start=image())


def continue_clip_by_text() -> Call:
    return partial(reading_pipe(), start=image())


def make_clip() -> Call:
    return partial(_clips(), prompt="a red circle")


def ask() -> Call:
    return partial(_reader(), images=scene(), question="what?", max_new_tokens=2)


_REQUEST = mmaccel.Request(CAPTIONS[0], 1)
_NEGATIVE = {"negative_prompt": "red", "guidance_scale": 1}
PIPELINES = [
    *table(
        draw,
        ({"prompt": "a green circle"}, "received 'green'; it knows: a red blue … name another",
         {"prompt": "a red circle"}),
        ({"prompt": [5]}, "prompt: expected a prompt, received 5", {"prompt": CAPTIONS[:1]}),
        ({"prompt": " ".join(["a"] * 13)}, "at most 12 words, received 13",
         {"prompt": " ".join(["a"] * 12)}),
        ({"policy": mmaccel.Stepwise()}, "such as mmaccel.Jacobi(window=32)",
         {"policy": Jacobi(window=32)}),
        ({"temprature": 1}, "expected options out of … did you mean temperature?", None),
        ({"seed": [1, 2]}, "seed: expected an integer or 1", {"seed": [1]}),
        ({"generator": torch.Generator(), "seed": 0}, "expected it or a seed", {"seed": None}),
        ({"output_type": "latent"}, "one of pil, pt, np, tokens", {"output_type": "pt"}),
        ({"num_inference_steps": 50}, "leave it out, or choose passes with policy",
         {"num_inference_steps": None}),
        ({"height": 512, "width": 512}, "size: expected … received 512x512",
         {"height": None, "width": None}),
        (_NEGATIVE, "guidance_scale other than 1 with it", {"guidance_scale": 2}),
        ({"negative_prompt": "a dragon"}, "negative prompt: expected words the … 'dragon'",
         {"negative_prompt": "red"}),
        ({"on_step": lambda progress: [1]}, "None or whole lengths [1] in return",
         {"on_step": lambda progress: None}, ShapeError),
        of="words",
    ),
    *table(
        draw,
        ({"policy": Jacobi()}, "such as mmaccel.LosslessUnmask(), received Jacobi",
         {"policy": mmaccel.LosslessUnmask()}),
        ({"policy": "stepwise", "num_inference_steps": 5}, "none under Stepwise … MaskedParallel()",
         {"policy": "masked-parallel"}),
        of="masked", before_passes=True,
    ),
    *table(
        draw,
        ({"negative_prompt": "a <boi>"}, "negative prompt: … <boi>", {"negative_prompt": "cat"}),
        of="emu3", before_passes=True,
    ),
    *table(
        serve,
        ({"requests": [_REQUEST, mmaccel.Request("a purple dragon", 1)]}, "dragon",
         {"requests": [_REQUEST]}),
        ({"requests": [_REQUEST, CAPTIONS[0]]}, "requests: expected a list", None),
        before_passes=True,
    ),
    *table(
        say,
        ({"text": "  "}, "prompt: expected text to say, received '  '", {"text": "a fox"}),
        ({"text": "say <|eot_id|> twice"}, "expected words … <|eot_id|>", {"text": "say twice"}),
        ({"text": "fox " * 10_000}, "positions: expected at most 160 … shorten the text",
         {"text": "fox"}),
        ({"text": "a \ud800 fox"}, r"received '\ud800' at position 2; write it", {"text": "a fox"}),
        ({"voice": "a:b"}, "voice: expected a name such as tara, leah", {"voice": "tara"}),
        of="orpheus", before_passes=True,
    ),
    *table(
        say, ({"voice": "tara"}, "voice: expected none for Llasa", {"voice": None}),
        of="llasa", before_passes=True,
    ),
    *table(
        say_by_voices,
        ({"text": "a red foxx"}, "words that the model knows (6) … did you mean fox?",
         {"text": "a red fox"}),
        ({"text": "red " * 10_000}, "at most 200 parts of 5 words … write several texts",
         {"text": ["red", "red"]}),
        ({"voice": "zoe"}, "voice: expected one of ada, ben … leave it out for ada",
         {"voice": None}),
        before_passes=True,
    ),
    *table(
        continue_clip,
        ({"start": Image.new("F", (5, 5))}, "expected 8 or 16 bits a channel … mode 'F'",
         {"start": Image.new("L", (5, 5))}),
        ({"start": "clip.mp4"}, "received str 'clip.mp4'", {"start": image()}),
        ({"start": torch.full((1, 4, 4, 3), 1.5)}, "floats in 0..1, received 1.5..1.5",
         {"start": torch.ones(1, 4, 4, 3)}),
        ({"prompt": "a fox runs"}, "a model that reads no text … Video2World", {"prompt": None}),
        before_passes=True,
    ),
    *table(
        continue_clip_by_text,
        ({"prompt": None}, "prompt: expected what happens in the clip", {"prompt": "a fox"}),
        before_passes=True,
    ),
    *table(
        make_clip,
        ({"prompt": "a rad circle"}, "received 'rad' (nearest: 'red')", {"prompt": "a red circle"}),
        ({"start": "a.png"}, "start: expected an image, a list of images or a tensor", None),
        (_NEGATIVE, "guidance_scale other than 1 with it", {"guidance_scale": 2}),
        before_passes=True,
    ),
    *table(
        ask,
        ({"images": "none.png"}, "image: expected a file … none.png'", {"images": scene()}),
        ({"question": ""}, "prompt: expected a question, received ''", {"question": "what?"}),
        ({"question": "is <image> <image> red?"}, "images: expected 2, one for each <image>",
         {"question": "is <image> red?"}),
        ({"max_new_tokens": 5000}, "positions: expected at most 2048", {"max_new_tokens": 2}),
        before_passes=True,
    ),
]  # fmt: skip

CASES: list[Refused] = [
    *ATTACHED, *STRICT, *MASKED, *CLASSES, *OWN, *VISION, *PIPELINES
]  # fmt: skip
