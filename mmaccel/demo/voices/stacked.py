"""`voices` with 16 codes a frame: transformers' CSM class over stacked codes, to attach windows to.

    voices = open_stacked()
    with mmaccel.attach(voices.model, mmaccel.Jacobi(window="adaptive")):
        spoken = voices.speak("the red bird sings", seed=0)

A frame of 160 ms holds four frames of the codec's stacked layout in order, each of four books.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.catalog import DEMO_WEIGHTS
from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.loading.moving import ready
from mmaccel.pipelines.models.voices import VoicesSpeech
from mmaccel.pipelines.text_to_speech.pipeline import TextToSpeech
from mmaccel.pipelines.text_to_speech.plan import check_call
from mmaccel.pipelines.text_to_speech.streaming import check_sound

FOLDER = "depth"


@dataclass(frozen=True)
class Spoken:
    """An utterance."""

    codes: Tensor  # [F, Q] int64, without the frame that ends them
    waveform: Tensor  # [samples] float32 in -1..1
    sample_rate: int
    is_finished: bool  # whether the model ended it


class StackedVoices:
    """A `CsmForConditionalGeneration`, with the text's side and the codec of the flat `voices`."""

    def __init__(self, model: Any, speech: VoicesSpeech) -> None:
        self.model = model
        self._speech = speech
        self._codec = speech.codec
        stack = model.config.num_codebooks // self._codec.books
        self.frame_seconds = 2 * stack * self._codec.hop / self._codec.sample_rate

    def speak(self, text: str, voice: str | None = None, seed: int = 0, **options: Any) -> Spoken:
        codes = self.generate(text, voice, seed, **options)
        ends = (codes[:, 0] == self.model.config.codebook_eos_token_id).nonzero()
        if len(ends):
            codes = codes[: int(ends[0])]
        return Spoken(codes, self.render(codes), self._codec.sample_rate, len(ends) > 0)

    @torch.no_grad()
    def generate(
        self,
        text: str,
        voice: str | None = None,
        seed: int = 0,
        *,
        max_seconds: float = 6.0,
        temperature: float = 1.0,
    ) -> Tensor:
        """The frames of a text, at most 8 words, by the model's own `generate`: codes `[F, Q]`
        int64, the frame that ends them included. Torch's own generator stays as it was.
        """
        check_call([text], seed, max_seconds=max_seconds, temperature=temperature)
        prompt = torch.tensor([self._speech.encode(text, voice)], dtype=torch.int64)
        most = self.model.config.max_position_embeddings - prompt.shape[1]
        n_frames = int(max_seconds / self.frame_seconds)
        if not 1 <= n_frames <= most:
            raise OptionError(
                f"max_seconds: expected {self.frame_seconds:g}, one frame, to "
                f"{most * self.frame_seconds:g}, as many as the model has positions, received "
                f"{max_seconds:g}"
            )
        choice: dict[str, Any] = {"do_sample": False, "depth_decoder_do_sample": False}
        if temperature > 0:
            sampled = {"do_sample": True, "temperature": float(temperature), "top_k": 0}
            choice = sampled | {f"depth_decoder_{name}": value for name, value in sampled.items()}
        device = self.model.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            ids = (prompt - self._codec.flat_size).to(device)
            codes: Tensor = self.model.generate(ids, max_new_tokens=n_frames, **choice)[0]
        return codes

    @torch.no_grad()
    def render(self, codes: Tensor) -> Tensor:
        """Frames `[F, Q]` to sound `[samples]` float32; an end within a frame is the last code."""
        if not len(codes):
            return torch.zeros(0, dtype=torch.float32)
        stacked = codes.clamp(max=self._codec.book_size - 1).view(1, -1, self._codec.books)
        return check_sound(self._codec.decode_stacked(stacked.to(ready(self._codec)))[0], 0)


def open_stacked(folder: str | Path = "voices", device: str = "cpu") -> StackedVoices:
    """Opens the embedded model, float32, or that of a folder of `scripts.training voices`."""
    from transformers import CsmForConditionalGeneration

    pipe = TextToSpeech.from_pretrained(folder, device=device)
    home = DEMO_WEIGHTS / "voices" if str(folder) == "voices" else Path(folder)
    if not (home / FOLDER / "config.json").is_file():
        raise OptionError(
            f"folder: expected one with {FOLDER}/config.json, received {home}; "
            "`python -m scripts.training voices` trains it"
        )
    speech: Any = pipe.speech
    model: Any = CsmForConditionalGeneration.from_pretrained(home / FOLDER, dtype=torch.float32)
    return StackedVoices(model.to(ready(speech.codec)).eval(), speech)
