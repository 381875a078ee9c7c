"""Types of image to video, whose clips `TextToVideo` returns, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mmaccel.contracts import TokenModel
from mmaccel.results import ShortRepr, Stats
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.grid import Grid


class VideoModel(Protocol):
    """A token model with its codec: frames to prompts, and tokens to frames. One class a family."""

    window: TokenModel  # predicts the tokens, in raster order, frame after frame
    layout: Grid  # rows and columns of a frame of tokens
    params: SamplingParams  # that the model's authors recommend
    n_frames: int  # frames of tokens in a clip
    starts: tuple[int, ...]  # numbers of pixel frames that a clip may begin with, smallest first
    size: tuple[int, int]  # width and height of the pixel frames
    fps: float  # pixel frames a second

    def encode_prompt(self, prompt: str | None) -> list[int]:
        """Ids of a text that says what happens in the clip; none where the model reads no text."""

    def begin(self, prompt: list[int], given: Tensor) -> Tensor:
        """Read a prompt of `encode_prompt` and frames `[f, rows, columns]` of `encode`.

        Returns what the next run's clips begin with, `[n]` int64: own tokens, then the frames'.
        """

    def encode(self, frames: Tensor) -> Tensor:
        """`[f, rows, columns]` int64 of the first frames `[F, 3, height, width]` float32 in -1..1
        of a clip, F one of `starts`: whole frames of tokens that depend on these frames alone.
        """

    def render(self, tokens: Tensor) -> Tensor:
        """Frames `[F, height, width, 3]` uint8, on the CPU, of `[frames, rows, columns]` int64."""


@dataclass(frozen=True, repr=False)
class Clip(ShortRepr):
    """One clip.

    Attributes:
        index: of its seed in the list of the call.
        seed: of this clip, in 0..2**64-1.
        frames: `[F, height, width, 3]` uint8, on the CPU, those given as the codec reproduces them.
        n_given: pixel frames that were given.
        n_read: frames of tokens they were encoded to.
        fps: frames a second.
        tokens: `[frames, rows, columns]` int64, those of the given frames included, on the CPU.
        total_variation: as in `mmaccel.Stats`, of this clip.
        prompt: what it shows, or what happens in it; empty where a clip has none.
    """

    index: int
    seed: int
    frames: Tensor
    n_given: int
    n_read: int
    fps: float
    tokens: Tensor
    passes: int
    total_variation: float = 0.0
    prompt: str = ""


@dataclass(frozen=True, repr=False)
class Clips(ShortRepr):
    """Finished clips in the order of the seeds, and the stats of the run."""

    clips: list[Clip]
    stats: Stats

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> Clip:
        return self.clips[index]
