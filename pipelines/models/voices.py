"""`voices`: a small Llama that continues phonemes with the codes of a small codec, one every 20 ms.

The layout of Llasa (Z. Ye et al., 2025, arXiv 2502.04128). `voices.json` of a folder has speakers,
words with their phonemes, and the rates of the codec, `mmaccel.tokenizers_vq.speech_codec`.

Departures: the text is phonemes, looked up word by word in a closed list; only codes and the end
token can be sampled.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.checks import show, suggest
from mmaccel.config_files import read_json, read_settings
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig, check_prompt
from mmaccel.pipelines.hosts.loading.moving import ready
from mmaccel.pipelines.models.token_names import find_ids, find_range, load_window
from mmaccel.pipelines.models.voices_vocabulary import CODE, END, list_prompt, split_text
from mmaccel.pipelines.text_to_speech.types import SoundContext
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.frames import Frames
from mmaccel.tokenizers_vq.speech_codec import SpeechCodec, load_codec

FILE = "voices.json"
_SENTENCE_ENDS = re.compile(r"[.!?;:\n]+")
_MOST_PARTS = 200


@dataclass(frozen=True)
class VoicesFacts:
    """What `voices.json` has."""

    longest: int  # most words of a text
    sample_rate: int  # of the codec
    frame_samples: int
    speakers: tuple[str, ...]  # the usual one first
    words: dict[str, list[str]]  # the phonemes of each


class SpokenWords:
    """The text's side of a model that speaks words of a closed list in several voices."""

    repetition_penalty = 1.0
    float32_parts = ("codec",)

    def __init__(self, tokenizer: Any, codec: SpeechCodec, facts: VoicesFacts) -> None:
        self.tokenizer = tokenizer
        self.codec = codec
        self.voices = facts.speakers
        self._words = facts.words
        self._longest = facts.longest
        self.sample_rate = codec.sample_rate
        rates = (codec.sample_rate, codec.hop)
        if rates != (facts.sample_rate, facts.frame_samples):
            raise UnsupportedModelError(
                f"codec: expected {facts.sample_rate} Hz and {facts.frame_samples} samples a code, "
                f"as {FILE} says, received {rates[0]} Hz and {rates[1]}; give the model's codec"
            )

    def split(self, text: str) -> list[str]:
        """Sentences, and of longer ones parts of similar lengths."""
        check_prompt(text, self.tokenizer, "text to say")
        if len(split_text(text)) <= self._longest:
            return [text]
        parts = []
        for sentence in _SENTENCE_ENDS.split(text):
            words = split_text(sentence)
            if not words:  # behind the last full stop
                continue
            count = -(-len(words) // self._longest)
            ends = [len(words) * k // count for k in range(count + 1)]
            for first, end in pairwise(ends):
                parts.append(" ".join(words[first:end]))
        if len(parts) > _MOST_PARTS:
            raise OptionError(
                f"text: expected at most {_MOST_PARTS} parts of {self._longest} words, received "
                f"{len(parts)}; write several texts"
            )
        return parts

    def list_names(self, text: str, voice: str | None) -> list[str]:
        """Names of a prompt's tokens."""
        speaker = self.voices[0] if voice is None else voice
        if speaker not in self.voices:
            raise OptionError(
                f"voice: expected one of {', '.join(self.voices)}, received {show(voice)}; "
                f"leave it out for {self.voices[0]}"
            )
        words = split_text(check_prompt(text, self.tokenizer, "text to say"))
        if not words:
            raise OptionError(
                f"text: expected words, received {show(text)}, which has none; write one"
            )
        if len(words) > self._longest:
            raise OptionError(
                f"text: expected at most {self._longest} words, as many as the model learnt, "
                f"received {len(words)}; give each part as a text of its own"
            )
        for word in words:
            if word not in self._words:
                raise OptionError(
                    f"text: expected words that the model knows ({len(self._words)}), received "
                    f"{show(word)}; {suggest(word, self._words, f'they are in its {FILE}')}"
                )
        return list_prompt(speaker, [self._words[word] for word in words])


class VoicesSpeech(SpokenWords):
    """A `SpeechModel`; its tokenizer has a token for each code, phoneme and speaker."""

    params = SamplingParams(temperature=1.0)

    def __init__(
        self, window: CausalLMWindow, tokenizer: Any, codec: SpeechCodec, facts: VoicesFacts
    ) -> None:
        super().__init__(tokenizer, codec, facts)
        self.window = window
        self.frame_samples = codec.hop
        self.sound_context = SoundContext(codec.reach, step=2)
        first, _ = CODE.split("{}")
        known = sum(token.startswith(first) for token in tokenizer.get_vocab())
        if known != codec.flat_size:
            raise UnsupportedModelError(
                f"codec: expected {known} codes, as many as the model has, received one of "
                f"{codec.flat_size}; give the model's codec"
            )
        self._first = find_range(tokenizer, CODE, 0, known)
        (end,) = find_ids(tokenizer, END)
        codes = (self._first, self._first + codec.flat_size)
        self.layout = Frames((codes,), window.vocab_size, (end,))
        vectors = codec.flat.decode(torch.arange(codec.flat_size, device=codec.window.device))
        after = window.vocab_size - codes[1]
        window.codes = F.pad(vectors, (0, 0, self._first, after), value=math.nan)

    def encode(self, text: str, voice: str | None) -> list[int]:
        return find_ids(self.tokenizer, *self.list_names(text, voice))

    def render(self, tokens: Tensor, seed: int) -> Tensor:
        """The codec is deterministic."""
        codes = (tokens - self._first)[None].to(ready(self.codec))
        sound: Tensor = self.codec.decode(codes)[0]
        return sound


def load_voices(source: Path, tokenizer: Any, codec: Path, load_config: LoadConfig) -> VoicesSpeech:
    """Load the language model of a folder with `voices.json`, and the codec in float32."""
    file = source / FILE
    facts = read_settings(VoicesFacts, read_json(file), file)
    sound = load_codec(codec).to(load_config.device)
    return VoicesSpeech(load_window(source, load_config), tokenizer, sound, facts)
