"""The rows of docs/compatibility.md: tiny models of every family, and how each is called.

Weights are random. A row's classes are those of the library that published them, where there is
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mmaccel
from mmaccel.contracts import Denoiser
from mmaccel.pipelines.hosts.attach.unwrap import unwrap
from mmaccel.results import Stats
from tests.fixtures import amused, diffusion_gemma, llada2, next_scale, windows
from tests.fixtures.checkpoints import SIZES, build_checkpoint, captions
from tests.fixtures.denoiser_targets import TARGETS, images
from tests.fixtures.masked_speech import build_omnivoice
from tests.fixtures.media import image
from tests.fixtures.speech import SECONDS, TEXTS, build_speech
from tests.fixtures.tiny_lms import PAD, build_lm, left_padded
from tests.fixtures.tiny_model import CAPTIONS, build_tiny, masked_beside_plain
from tests.fixtures.tiny_vlms import CONFIGS, build_vlm, draw_prompts, draw_videos
from tests.fixtures.video import build_video

PROMPTS = [[26, 27, 28, 29], [30, 31], [33, 32, 31, 30, 29, 28]]
LM_TITLE = "decoder-only language models"
LMS = ("llama", "qwen2", "qwen3", "gemma", "gemma3", "cohere", "mistral", "olmo3", "gpt2")
READ_VIDEOS = ("llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SEEDS = [3, 4, 5]
Made = tuple[list[Tensor], Stats]


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        section: "attached", "pipelines" or "canvas".
        name: as the catalogue or a registry has it.
        title: for readers.
        build: a target from an empty folder.
        call: tokens of a target under a policy, for the first `n` prompts and their seeds, or
            `seed`, with options of `attach`; of each prompt a tensor.
        module: the network in a target, to be quantised; None where a row does not try.
        has_images: whether visual tokens can be reduced.
    """

    section: str
    name: str
    title: str
    build: Callable[[Path], Any]
    call: Callable[..., Made]
    module: Callable[[Any], Any] | None = None
    has_images: bool = False


def attached(
    target: Any, policy: Any, seeds: list[int], run: Callable[[], Any], **own: Any
) -> Made:
    """What a call returns under an attached policy that serves it, as rows."""
    options = {"seed": seeds, "strict": True} | own
    with mmaccel.attach(target, policy, **options) as handle:
        made = run()
    assert handle.stats is not None and handle.stats.fallbacks == []
    return list(made), handle.stats


def first(n: int, seed: Any) -> Any:
    """The first `n` of several seeds, or the one that is given."""
    return seed[:n] if isinstance(seed, list) else seed


def on(target: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs where a model is."""
    return {name: value.to(target.device) for name, value in inputs.items()}


def _language_model(model: Any, policy: Any, n: int, **own: Any) -> Made:
    rows = [[5, 6, 7, 8], [9, 4, 11], [8, 8]][:n]
    inputs = on(model, left_padded(rows))
    options: dict[str, Any] = dict(max_new_tokens=14, do_sample=True, pad_token_id=PAD)
    width = inputs["input_ids"].shape[1]
    return attached(
        model, policy, SEEDS[:n], lambda: model.generate(**inputs, **options)[:, width:], **own
    )


def _image_model(name: str) -> Callable[..., Made]:
    def call(model: Any, policy: Any, n: int, **own: Any) -> Made:
        rows = PROMPTS[:n] if name != "imagegpt" else [row[:2] for row in PROMPTS[:n]]
        if name == "janus":
            inputs = windows.janus_prompts(rows)
            options = {"generation_mode": "image", "guidance_scale": 3.0, "do_sample": True}
            start = 0
        else:
            inputs = windows.prompts(name, rows)
            options = {"max_new_tokens": windows.LENGTHS[name], "do_sample": True}
            start = inputs["input_ids"].shape[1]
        seeds, inputs = SEEDS[:n], on(model, inputs)
        return attached(
            model, policy, seeds, lambda: model.generate(**inputs, **options)[:, start:], **own
        )

    return call


def _vision_language(name: str) -> Callable[..., Made]:
    def call(model: Any, policy: Any, n: int, videos: bool = False, **own: Any) -> Made:
        if videos:
            frames = (3, 3, 3) if name == "llava_onevision" else (3, 1, 2)
            inputs = draw_videos(name, unwrap(model), frames[:n])
        else:
            inputs = draw_prompts(name, unwrap(model), (2, 0, 1)[:n])
        options: dict[str, Any] = dict(max_new_tokens=12, do_sample=True, pad_token_id=PAD)
        return attached(
            model, policy, SEEDS[:n], lambda: model.generate(**inputs, **options)[:, -12:], **own
        )

    return call


def _pipeline(texts: list[str], items: Callable[[Any], Any], **options: Any) -> Callable[..., Made]:
    """A pipeline that is called with texts; `items` has the tokens of each one."""

    def call(pipe: Any, policy: Any, n: int, seed: Any = SEEDS) -> Made:
        made = pipe(texts[:n], policy=policy, seed=first(n, seed), **options)
        return list(items(made)), made.stats

    return call


def _images(family: str) -> Callable[..., Made]:
    texts = CAPTIONS if "words" in family else captions(family)
    return _pipeline(texts, lambda made: made.tokens, output_type="tokens")


def _open_images(family: str) -> Callable[[Path], Any]:
    def build(folder: Path) -> Any:
        if family == "words":
            source = build_tiny(folder)
        elif family == "masked-words":
            source = masked_beside_plain(folder)[0]
        elif family == "scale-words":
            source = next_scale.build_folder(folder)
        else:
            source = build_checkpoint(family, folder)
        return mmaccel.TextToImage.from_pretrained(source, size=SIZES.get(family))

    return build


def _open_speech(family: str) -> Callable[[Path], Any]:
    def build(folder: Path) -> Any:
        model, codec = build_speech(family, folder)
        return mmaccel.TextToSpeech.from_pretrained(model, codec=codec)

    return build


def _speech(texts: list[str], **options: Any) -> Callable[..., Made]:
    return _pipeline(texts, lambda made: [one.tokens for one in made.utterances], **options)


def _open_video(folder: Path) -> Any:
    model, codec = build_video(folder)
    return mmaccel.ImageToVideo.from_pretrained(model, codec=codec)


def _video(pipe: Any, policy: Any, n: int, seed: Any = SEEDS) -> Made:
    made = pipe(image(), policy=policy, seed=first(n, seed))
    return [clip.tokens for clip in made.clips], made.stats


def _denoiser(target: Any, policy: Any, n: int, **own: Any) -> Made:
    inputs = on(_network(target), left_padded([[9, 2, 5, 1], [13, 3], [5]][:n]))
    options: dict[str, Any] = dict(max_new_tokens=6, temperature=1.0)
    return attached(
        target, policy, SEEDS[:n],
        lambda: target.generate(**inputs, **options)[:, -6:], **own,
    )  # fmt: skip


def _prompted(texts: list[str], **options: Any) -> Callable[..., Made]:
    """A pipeline of diffusers that is called with texts; what it returns has one field."""

    def call(pipe: Any, policy: Any, n: int, **own: Any) -> Made:
        return attached(
            pipe, policy, SEEDS[:n], lambda: pipe(prompt=texts[:n], **options)[0], **own
        )

    return call


def _gemma_model(model: Any, policy: Any, n: int, **own: Any) -> Made:
    ids = torch.arange(3, 24).view(3, 7)[:n].to(model.device)
    return attached(
        model, policy, SEEDS[:n],
        lambda: model.generate(ids, max_new_tokens=13).sequences[:, 7:], **own,
    )  # fmt: skip


def _network(target: Any) -> Any:
    """The network of a model, or of a denoiser around one."""
    return target.model if isinstance(target, Denoiser) else target


_VLM_TITLES = {
    "chameleon": "Chameleon", "gemma3": "Gemma 3", "idefics3": "Idefics3", "internvl": "InternVL",
    "janus": "Janus", "llava": "LLaVA", "llava_next": "LLaVA-NeXT", "smolvlm": "SmolVLM",
    "llava_onevision": "LLaVA-OneVision", "qwen2_5_vl": "Qwen2.5-VL", "qwen2_vl": "Qwen2-VL",
    "qwen3_vl": "Qwen3-VL",
}  # fmt: skip
_IMAGE_TITLES = {
    "chameleon": "Chameleon, text",
    "emu3": "Emu3, images made",
    "glm_image": "GLM-Image, images made",
    "imagegpt": "ImageGPT, images made",
    "janus": "Janus, images made",
}
_FAMILY_TITLES = {
    "words": "`scenes`", "masked-words": "`scenes-masked`", "scale-words": "`scenes-var`",
    "janus": "Janus-Pro", "emu3": "Emu3-Gen", "chameleon": "Anole", "lumina-mgpt": "Lumina-mGPT",
    "glm-image": "GLM-Image", "imagegpt": "ImageGPT", "llamagen": "LlamaGen",
    "var": "VAR", "hart": "HART",
    "infinity": "Infinity",
}  # fmt: skip
_CANVAS = {  # target of tests/fixtures/denoiser_targets -> name in a registry, title
    "llada": ("llada", "LLaDA"), "mmada": ("mmada", "MMaDA, text"), "dream": ("Dream", "Dream"),
    "sdar": ("sdar", "SDAR, TraDo"), "fast-dllm": ("Fast_dLLM_Qwen", "Fast-dLLM v2"),
    "masked-lm": ("MaskedLM", "`MaskedLM` around a decoder of transformers"),
}  # fmt: skip


def _ignoring_folder(build: Callable[..., Any], *arguments: Any) -> Callable[[Path], Any]:
    return lambda folder: build(*arguments)


def _build_image_model(name: str) -> Any:
    return windows.build_janus() if name == "janus" else windows.build_model(name)


def rows() -> Iterator[Row]:
    """All rows, in the order of the page."""
    made = _ignoring_folder
    for name in LMS:
        kind = "gemma3_text" if name == "gemma3" else name
        yield Row("attached", kind, LM_TITLE, made(build_lm, name), _language_model, _network)
    for name in CONFIGS:
        title, call = f"{_VLM_TITLES[name]}, images read", _vision_language(name)
        yield Row("attached", name, title, made(build_vlm, name), call, _network, True)
    for name, title in _IMAGE_TITLES.items():
        build = made(_build_image_model, name)
        yield Row("attached", name, title, build, _image_model(name), _network)
    for family, title in _FAMILY_TITLES.items():
        own = "llamagen-c2i" if family == "llamagen" else family
        yield Row("pipelines", family, title, _open_images(own), _images(own))
    speech = {name: _speech(TEXTS, max_seconds=seconds) for name, seconds in SECONDS.items()}
    yield Row("pipelines", "llasa", "Llasa", _open_speech("llasa"), speech["llasa"])
    masked_speech = _speech(["a red fox", "blue", "the grass"], temperature=1.0)
    omnivoice = made(lambda: mmaccel.TextToSpeech(build_omnivoice()))
    yield Row("pipelines", "omnivoice", "OmniVoice", omnivoice, masked_speech)
    yield Row("pipelines", "orpheus", "Orpheus", _open_speech("orpheus"), speech["orpheus"])
    yield Row("pipelines", "cosmos", "Cosmos-Predict1", _open_video, _video)
    for own, (name, title) in _CANVAS.items():
        network = _network if own == "masked-lm" else None  # the others are stand-ins
        yield Row("canvas", name, title, made(TARGETS[own]), _denoiser, network)
    lumina = made(images, "lumina")
    yield Row("canvas", "LuminaDenoiser", "Lumina-DiMOO", lumina, _denoiser)
    drawn: dict[str, Any] = {"eos_early_stop": False, "temperature": 1.0}
    for name, title, build, call in (
        ("LLaDA2Pipeline", "LLaDA2, diffusers", made(llada2.build_pipe, "blocks"),
         _prompted(["hello there", "abc", "hello"], gen_length=20, **drawn)),
        ("AmusedPipeline", "aMUSEd, diffusers", made(amused.build_pipe),
         _prompted(["abc", "x", "no"], output_type="latent", guidance_scale=3.0)),
        (
            "DiffusionGemmaForBlockDiffusion", "DiffusionGemma, transformers",
            made(diffusion_gemma.build_model), _gemma_model,
        ),
        (
            "DiffusionGemmaPipeline", "DiffusionGemma, diffusers",
            made(diffusion_gemma.build_pipe),
            _prompted(["hello", "abc", "x"], gen_length=12, **drawn),
        ),
    ):  # fmt: skip
        yield Row("canvas", name, title, build, call)
