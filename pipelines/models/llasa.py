"""Llasa: a Llama that continues text with codes of X-codec2, one every 20 ms.

Z. Ye et al., "Llasa: Scaling Train-Time and Inference-Time Compute for Llama-based Speech
Synthesis", 2025 (arXiv 2502.04128); the codec is X-codec2 of the same paper, in transformers.

Departures: only codes and the end token can be sampled; the authors sample from the whole
vocabulary and drop other ids. There is no speech prompt: the model chooses the voice. The date in
Llama's chat template is always the template's default, so that a text sounds the same every day.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from mmaccel.checks import show
from mmaccel.contracts import TokenModel
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig, check_prompt, load_model
from mmaccel.pipelines.hosts.loading.moving import ready
from mmaccel.pipelines.models.token_names import find_ids, find_range, load_window
from mmaccel.pipelines.text_to_speech.types import SoundContext
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.frames import Frames

_START = "<|SPEECH_GENERATION_START|>"
_DATE = "26 Jul 2024"
_ENCODERS = ("semantic_encoder", "semantic_adapter", "acoustic_encoder", "fc_encoder")


class LlasaSpeech:
    """A `SpeechModel` with a `Xcodec2Model`, whose encoders are not used."""

    params = SamplingParams(temperature=0.8, top_k=50)  # 50: default of the authors' `generate`
    repetition_penalty = 1.0
    voices: tuple[str, ...] = ()
    float32_parts = ("codec",)
    sound_context = SoundContext(None)  # the codec's decoder attends to all frames

    def __init__(self, window: TokenModel, tokenizer: Any, codec: Any) -> None:
        self.window, self.tokenizer, self.codec = window, tokenizer, codec
        count = math.prod(codec.config.quantization_levels)
        self._first = find_range(tokenizer, "<|s_{}|>", 0, count)
        (end,) = find_ids(tokenizer, "<|SPEECH_GENERATION_END|>")
        self.layout = Frames(((self._first, self._first + count),), window.vocab_size, (end,))
        self.sample_rate: int = codec.config.sampling_rate
        self.frame_samples: int = codec.config.hop_length
        self._check_template()

    def split(self, text: str) -> list[str]:
        return [text]

    def encode(self, text: str, voice: str | None) -> list[int]:
        if voice is not None:
            raise OptionError(
                f"voice: expected none for Llasa, which chooses by itself, received {show(voice)}; "
                "leave it out"
            )
        words = check_prompt(text, self.tokenizer, "text to say")
        marked = f"<|TEXT_UNDERSTANDING_START|>{words}<|TEXT_UNDERSTANDING_END|>"
        chat = [
            {"role": "user", "content": f"Convert the text to speech:{marked}"},
            {"role": "assistant", "content": _START},
        ]
        encoded = self.tokenizer.apply_chat_template(
            [chat], continue_final_message=True, date_string=_DATE, return_dict=True
        )
        ids: list[int] = encoded["input_ids"][0]
        return ids

    def _check_template(self) -> None:
        (start,) = find_ids(self.tokenizer, _START)
        if self.encode("a", None)[-1:] != [start]:
            raise UnsupportedModelError(
                f"model: expected a tokenizer with a chat template that ends with {_START}, "
                "received a prompt that ends otherwise; copy the folder again, with its tokenizer "
                "files"
            )

    def render(self, tokens: Tensor, seed: int) -> Tensor:
        """The codec is deterministic."""
        codes = (tokens - self._first)[None, None]  # [1, 1, n]
        sound: Tensor = self.codec.decode(codes.to(ready(self.codec))).audio_values.flatten()
        return sound


def load_llasa(source: Path, tokenizer: Any, codec: Path, load_config: LoadConfig) -> LlasaSpeech:
    """Load the language model, and the codec in float32."""
    from transformers import Xcodec2Model

    sound = load_model(Xcodec2Model, codec, LoadConfig(device=load_config.device), option="codec")
    for name in _ENCODERS:
        setattr(sound, name, None)  # 70 % of its parameters
    return LlasaSpeech(load_window(source, load_config), tokenizer, sound)
