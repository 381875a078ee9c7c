"""The text-to-video model of this package: clips from prompts in a closed list of words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from mmaccel.contracts import TokenModel
from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig
from mmaccel.pipelines.hosts.loading.moving import ready
from mmaccel.pipelines.models.scenes import WordPrompts, load_window
from mmaccel.pipelines.models.scenes_vocabulary import FILE, CaptionWords, read_clips
from mmaccel.pipelines.text_to_video.types import ClipModel


class WordClips(WordPrompts, ClipModel):
    """A demo model as a `ClipModel`; the tokenizer encodes and decodes frames."""

    def __init__(
        self, window: TokenModel, tokenizer: Any, words: CaptionWords, n_frames: int, fps: float
    ) -> None:
        super().__init__(window, tokenizer, words)
        self.n_frames, self.fps = n_frames, fps

    def encode(self, text: str) -> list[int]:
        return self.append_given(self.words.encode(text))

    def unconditional(self) -> list[int]:
        return self.append_given(self.words.unconditional())

    def encode_frames(self, frames: Tensor) -> Tensor:
        tokens: Tensor = self.tokenizer.encode((frames.to(ready(self.tokenizer)) + 1) / 2)
        return tokens

    def decode_frames(self, tokens: Tensor) -> Tensor:
        return self.decode(tokens)


def load_moving_words(folder: Path, load_config: LoadConfig) -> WordClips:
    """Load a causal LM that draws clips: the files of `load_words`, with `n_frames` and `fps`."""
    content = read_clips(folder)
    if content is None:
        raise OptionError(
            f"model: expected {FILE} with n_frames and fps in {folder}, received none; give a "
            "text-to-video model"
        )
    window, tokenizer, words = load_window(folder, load_config)
    return WordClips(window, tokenizer, words, content["n_frames"], content["fps"])
