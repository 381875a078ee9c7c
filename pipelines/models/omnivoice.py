"""OmniVoice: text to 8 codes every 40 ms, all of an utterance at once, by a Qwen3.

H. Zhu et al., "OmniVoice: Towards Omnilingual Zero-Shot Text-to-Speech with Diffusion Language
Models", 2026, arXiv 2604.00688; config, tensors, prompt, and how long a text lasts
(`utils/duration.py`) as in https://github.com/k2-fsa/OmniVoice. The codec is transformers'
`HiggsAudioV2TokenizerModel`, in the folder `audio_tokenizer` or its authors'.

Departures: no prompts of sound, so that no voice is cloned; no language is named; a description of
the voice is not checked against the authors' words; sound is as the codec makes it, where the
authors cut silence and set the loudness; the mask's probability is no part of a confidence; a text
of more than `max_seconds` is refused, not cut in pieces.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.errors import MissingBackendError, UnsupportedModelError
from mmaccel.pipelines.hosts.diffusion_lm.speech_canvas import SpeechCanvas
from mmaccel.pipelines.hosts.diffusion_lm.speech_network import SpeechNetwork
from mmaccel.pipelines.hosts.loading.checkpoint import (
    LoadConfig,
    check_prompt,
    load_model,
    refuse_device_map,
)
from mmaccel.pipelines.hosts.loading.moving import ready
from mmaccel.pipelines.hosts.loading.refusal import refusing
from mmaccel.pipelines.text_to_speech.types import SoundContext
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.frames import CodeFrames
from mmaccel.weight_folders import Schema, open_folder, shapes_of

MODEL_TYPE, LLM_TYPE = "omnivoice", "qwen3"
_ENCODERS = ("acoustic_encoder", "encoder_semantic", "decoder_semantic", "semantic_model")
_TAGS = re.compile(
    r"(\[(?:laughter|sigh|confirmation-en|dissatisfaction-hnn"
    r"|question-(?:en|ah|oh|ei|yi)|surprise-(?:ah|oh|wa|yo))\])"
)
# The last code point of each run of scripts, and how long a letter of it lasts beside a Latin one
_LASTING = (
    (0x58F, 1.0), (0x8FF, 1.5), (0xDFF, 1.8), (0xEFF, 1.5), (0x109F, 1.8), (0x10FF, 1.0),
    (0x11FF, 2.5), (0x139F, 3.0), (0x177F, 1.0), (0x17FF, 1.8), (0x18FF, 1.0), (0x1C7F, 1.8),
    (0x1CBF, 1.0), (0x1CFF, 1.8), (0x1EFF, 1.0), (0x30FF, 2.2), (0x312F, 3.0), (0x318F, 2.5),
    (0xA4CF, 3.0), (0xA7FF, 1.0), (0xA82F, 1.8), (0xA87F, 1.0), (0xA95F, 1.8), (0xA97F, 2.5),
    (0xAAFF, 1.8), (0xAB2F, 3.0), (0xABBF, 1.0), (0xABFF, 1.8), (0xD7AF, 2.5), (0xFAFF, 3.0),
    (0xFDFF, 1.5), (0xFE6F, 1.0), (0xFEFF, 1.5), (0x20000, 1.0), (0x10FFFF, 3.0),
)  # fmt: skip
_LASTS = [last for last, _ in _LASTING]
_KINDS = {"M": 0.0, "P": 0.5, "S": 0.5, "Z": 0.2, "N": 3.5}  # by Unicode's general category
_SAID, _FRAMES = "Nice to meet you.", 25  # a text, and the frames that it lasts
_SHORT = 50  # frames below which an estimate grows as its cubic root


@dataclass(frozen=True)
class SpeechConfig:
    """What `config.json` has beside the language model's configuration."""

    audio_vocab_size: int = within(1025, 2)
    audio_mask_id: int = within(1024, 0)
    num_audio_codebook: int = within(8, 1, 64)
    spreads_text: bool = False  # of ours; see `SpeechNetwork`


FOLDER = Schema(
    "a checkpoint of OmniVoice",
    SpeechConfig,
    "give a checkpoint of k2-fsa/OmniVoice",
    option="model",
)


def load_canvas(folder: Path, load_config: LoadConfig) -> SpeechCanvas:
    """The network of `config.json` and `model.safetensors`; other layouts are refused by name."""
    from transformers import Qwen3Config, Qwen3Model

    refuse_device_map(load_config, "OmniVoice")
    opened = open_folder(FOLDER, folder)
    llm: Any = opened.content.get("llm_config")
    inner = llm.get("model_type") if isinstance(llm, dict) else llm
    kinds = opened.content.get("model_type"), inner
    sizes = opened.settings
    if kinds != (MODEL_TYPE, LLM_TYPE) or sizes.audio_mask_id >= sizes.audio_vocab_size:
        raise UnsupportedModelError(
            f"model: expected model_type {MODEL_TYPE} with an llm_config of {LLM_TYPE} and "
            f"audio_mask_id below audio_vocab_size in {folder}/config.json, received {kinds[0]} "
            f"with {kinds[1]} and {sizes.audio_mask_id} of {sizes.audio_vocab_size}; "
            f"{FOLDER.remedy}"
        )
    remedy = "give numbers as Qwen3Config takes them"
    with refusing(f"an llm_config of {LLM_TYPE}", "one that transformers refuses", remedy):
        with torch.device("meta"):
            outline = build_network(Qwen3Model(Qwen3Config(**llm)), sizes)
        weights = opened.weights.read(shapes_of(outline))
        network = build_network(Qwen3Model(Qwen3Config(**llm)), sizes)
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            weights[name] = tensor.to(load_config.dtype)
    network.load_state_dict(weights, assign=True)
    network.eval().requires_grad_(False).to(load_config.device)
    return SpeechCanvas(network, sizes.audio_mask_id)


def build_network(llm: Any, sizes: SpeechConfig) -> SpeechNetwork:
    return SpeechNetwork(llm, sizes.num_audio_codebook, sizes.audio_vocab_size, sizes.spreads_text)


class OmniVoiceSpeech:
    """A `CanvasSpeech`; `voice` is a description such as "female, low pitch"."""

    params = SamplingParams(temperature=0.0, guidance_scale=3.0)  # the authors' scale is one less
    repetition_penalty = 1.0
    voices: tuple[str, ...] = ()
    float32_parts = ("codec",)
    sound_context = SoundContext(None)  # what its decoder reads was not measured

    def __init__(self, window: SpeechCanvas, tokenizer: Any, codec: Any) -> None:
        self.window, self.tokenizer, self.codec = window, tokenizer, codec
        self.layout = CodeFrames(window.books)
        self.sample_rate: int = codec.config.sample_rate
        self.frame_samples: int = codec.config.hop_length
        books = len(codec.quantizer.quantizers), codec.config.codebook_size
        if books[0] < window.books or books[1] < window.vocab_size - 1:
            raise UnsupportedModelError(
                f"codec: expected {window.books} books of {window.vocab_size - 1} codes, as the "
                f"model has, received {books[0]} of {books[1]}; give the model's codec"
            )

    def split(self, text: str) -> list[str]:
        return [text]

    def encode(self, text: str, voice: str | None) -> list[int]:
        said = clean_text(check_prompt(text, self.tokenizer, "text to say"))
        style = f"<|lang_start|>None<|lang_end|><|instruct_start|>{voice or 'None'}<|instruct_end|>"
        pieces = _TAGS.split(f"<|text_start|>{said}<|text_end|>")
        ids = [self.tokenizer(piece).input_ids for piece in (style, *pieces) if piece]
        return self.window.to_canvas([k for piece in ids for k in piece])

    def unconditional(self) -> list[int]:
        return [self.window.nothing]

    def count_frames(self, text: str, voice: str | None) -> int:
        return estimate_frames(text)

    def render(self, tokens: Tensor, seed: int) -> Tensor:
        """The codec is deterministic."""
        codes = tokens.view(1, -1, self.window.books).mT  # [1, Q, T]
        sound: Tensor = self.codec.decode(codes.to(ready(self.codec))).audio_values.flatten()
        return sound


def clean_text(text: str) -> str:
    """A text on one line, with parentheses of ASCII and no spaces beside Chinese characters."""
    text = re.sub(r"[\r\n]+", "", text.strip()).replace("（", "(").replace("）", ")")
    text = re.sub(r"[ \t]+", " ", text)
    return re.sub(r"(?<=[\u4e00-\u9fff])\s+|\s+(?=[\u4e00-\u9fff])", "", text)


def estimate_frames(text: str) -> int:
    """Frames that a text lasts, by the scripts of its characters."""
    frames = _weigh(text) / (_weigh(_SAID) / _FRAMES)
    if frames < _SHORT:
        frames = _SHORT * (frames / _SHORT) ** (1 / 3)
    return max(1, int(frames))


def _weigh(text: str) -> float:
    return sum(_KINDS.get(unicodedata.category(c)[0], _weigh_letter(c)) for c in text)


def _weigh_letter(character: str) -> float:
    is_stretched = character == "\u0640"  # the tatweel of Arabic
    return 0.0 if is_stretched else _LASTING[bisect_left(_LASTS, ord(character))][1]


def load_omnivoice(
    source: Path, tokenizer: Any, codec: Path, load_config: LoadConfig
) -> OmniVoiceSpeech:
    """Load the network, and the decoder of the codec in float32."""
    if find_spec("torchaudio") is None:
        raise MissingBackendError(
            "codec: expected the package torchaudio, which transformers' codec of OmniVoice asks "
            "for, received none; pip install torchaudio"
        )
    from transformers import HiggsAudioV2TokenizerModel

    window = load_canvas(source, load_config)
    parts = LoadConfig(device=load_config.device)
    sound = load_model(HiggsAudioV2TokenizerModel, codec, parts, option="codec")
    for name in _ENCODERS:
        setattr(sound, name, None)  # only encoding needs them
    return OmniVoiceSpeech(window, tokenizer, sound)
