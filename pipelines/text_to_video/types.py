"""Types of text to video: the model a `TextToVideo` needs, and the outputs of its requests."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from mmaccel.contracts import Prompt, TokenModel
from mmaccel.pipelines.image_to_video.types import Clip
from mmaccel.pipelines.text_to_image.model import PromptedModel
from mmaccel.pipelines.text_to_image.outputs import Request
from mmaccel.results import ShortRepr
from mmaccel.tokenizers_vq.grid import Grid


class ClipModel(PromptedModel):
    """A `PromptedModel` of clips: the tokens of frames, one frame after another in raster order.

    A family defines `decode_frames` and `encode_frames`; its `encode` and `unconditional` end with
    `append_given`.
    """

    n_frames: int  # of a clip; a frame of tokens is one of pixels
    fps: float  # frames a second

    def __init__(self, window: TokenModel, layout: Grid, size: tuple[int, int]) -> None:
        super().__init__(window, layout, size)
        # [f, layout.frame] int64, tokens of the frames that a clip begins with, behind the words of
        # a prompt
        self.given = torch.empty(0, layout.frame, dtype=torch.int64, device="cpu")

    @property
    def length(self) -> int:
        return (self.n_frames - len(self.given)) * self.layout.frame

    @property
    def starts(self) -> range:
        return range(1, self.n_frames)

    @abstractmethod
    def encode_frames(self, frames: Tensor) -> Tensor:
        """Tokens `[f, layout.frame]` of frames `[f, 3, height, width]` float32 in -1..1."""

    @abstractmethod
    def decode_frames(self, tokens: Tensor) -> Tensor:
        """Frames `[f, 3, height, width]` in 0..1 of tokens `[f, layout.frame]`."""

    def append_given(self, ids: list[int]) -> list[int]:
        """The ids of a prompt, and the tokens of the given frames after them."""
        return [*ids, *self.given.flatten().tolist()]

    def begin(self, prompt: Prompt) -> Prompt:
        return super().begin(replace(prompt, n_shown=self.given.numel()))

    def start_with(self, frames: Tensor) -> Self:
        """A copy of this model whose clips begin with frames `[f, 3, height, width]` float32 in
        -1..1; f is one of `starts`. It shares the weights.
        """
        started = copy(self)
        started.given = self.encode_frames(frames).cpu()
        return started

    @torch.no_grad()
    def render(self, tokens: Tensor, prompts: Sequence[str], seeds: Sequence[int]) -> list[Any]:
        """Whole clips, given frames first: `[n_frames, height, width, 3]` uint8, on the CPU."""
        clips = tokens.unflatten(1, (-1, self.layout.frame))  # [B, f, n]
        pixels = [self.decode_frames(self.join(clip)) for clip in clips]
        return [each.mul(255).round().to("cpu", torch.uint8).permute(0, 2, 3, 1) for each in pixels]

    def join(self, frames: Tensor) -> Tensor:
        """The given frames and those after them: tokens `[f, n]` to `[n_frames, n]`."""
        return torch.cat((self.given.to(frames.device), frames))


@dataclass(frozen=True, repr=False)
class ClipOutput(ShortRepr):
    """A finished clip of a request and its cost."""

    request: Request
    clip: Clip
