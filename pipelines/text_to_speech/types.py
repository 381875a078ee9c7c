"""Types of text to speech: the model a `TextToSpeech` needs, and the speech it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from mmaccel.contracts import TokenModel
from mmaccel.results import ShortRepr, Stats
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.frames import CodeFrames, Frames


@dataclass(frozen=True)
class SoundContext:
    """Which frames must be decoded to sound together with others."""

    # frames to each side that a frame's sound depends on; None: the whole utterance's
    reach: int | None
    step: int = 1  # windows of frames begin at multiples of it


class SpeechModel(Protocol):
    """A token model with its codec: text to prompts, and tokens to sound. One class a family."""

    window: TokenModel  # predicts the tokens
    layout: Frames  # which ids a slot may take, and which end an utterance
    params: SamplingParams  # that the model's authors recommend
    repetition_penalty: float  # what they recommend; 1 is none. It counts the whole prefix
    sample_rate: int  # in Hz
    frame_samples: int  # of the sound of one frame of `layout.columns` tokens
    sound_context: SoundContext  # what its codec reads to decode a frame, for sound in chunks
    voices: tuple[str, ...]  # names its authors list; empty where a model takes none

    def split(self, text: str) -> list[str]:
        """Parts of a text, each of a prompt of its own; one where the model takes any length."""

    def encode(self, text: str, voice: str | None) -> list[int]:
        """The prompt ids of a text, said by a voice; None is the model's default.

        OptionError: a text the model cannot say, or a voice for a model that takes none.
        """

    def render(self, tokens: Tensor, seed: int) -> Tensor:
        """`[n / columns * frame_samples]` floats in about -1..1 of the tokens `[n]` of whole
        frames, without an end; `seed` is for codecs that draw random numbers.
        """


class CanvasSpeech(SpeechModel, Protocol):
    """A `Denoiser` of frames with its codec, whose canvas is as long as its text lasts."""

    window: Any  # a `Denoiser` with `n_positions`, of text and frames
    layout: CodeFrames  # type: ignore[assignment]

    def unconditional(self) -> list[int]:
        """The prompt ids of the other branch of guidance."""

    def count_frames(self, text: str, voice: str | None) -> int:
        """Frames of a text that `encode` takes, at least 1."""


@dataclass(frozen=True)
class SpeechRequest:
    """A request for one utterance."""

    text: str
    seed: int
    voice: str | None = None  # None is the model's default
    tag: Any = None  # any object that identifies the request
    in_chunks: bool = False  # whether its sound is delivered while it is decoded


@dataclass(frozen=True, repr=False)
class SpeechChunk(ShortRepr):
    """A piece of an utterance that is still being decoded.

    Attributes:
        waveform: `[samples]` float32 in -1..1, mono, on the CPU.
        start: seconds of the utterance before it.
        passes: forward passes of the run until it was there.
    """

    waveform: Tensor
    sample_rate: int
    start: float
    passes: int

    @property
    def seconds(self) -> float:
        return len(self.waveform) / self.sample_rate


@dataclass(frozen=True, repr=False)
class Utterance(ShortRepr):
    """One spoken text.

    Attributes:
        index: of the text in the list of the call.
        seed: of this utterance, in 0..2**64-1. Where one seed was given for all texts, it is that
            seed plus `index`: it identifies the utterance, but does not make it again alone.
        waveform: `[samples]` float32 in -1..1, mono, on the CPU.
        tokens: `[n]` int64, the tokens of whole frames, on the CPU.
        passes: forward passes it took part in until it was finished.
        is_finished: True if the model ended it, False if it was cut at the maximum length.
        total_variation: as in `mmaccel.Stats`, of this utterance.
    """

    index: int
    text: str
    voice: str | None
    seed: int
    waveform: Tensor
    sample_rate: int
    tokens: Tensor
    passes: int
    is_finished: bool
    total_variation: float = 0.0

    @property
    def seconds(self) -> float:
        return len(self.waveform) / self.sample_rate


@dataclass(frozen=True, repr=False)
class Speech(ShortRepr):
    """Finished utterances in the order of the texts, and the stats of the run."""

    utterances: list[Utterance]
    stats: Stats

    @property
    def real_time_factor(self) -> float:
        """Seconds of work for a second of sound; 0.0 where there is no sound."""
        seconds = sum(made.seconds for made in self.utterances)
        return (self.stats.seconds + self.stats.pixel_seconds) / seconds if seconds else 0.0

    def __len__(self) -> int:
        return len(self.utterances)

    def __getitem__(self, index: int) -> Utterance:
        return self.utterances[index]
