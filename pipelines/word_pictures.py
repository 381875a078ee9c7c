"""Pictures from captions in a closed list of words: the models that ship with the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from mmaccel.canvas_contracts import Denoiser
from mmaccel.contracts import Prompt, TokenModel, VisualTokenizer
from mmaccel.pipelines.caption_words import CaptionWords
from mmaccel.pipelines.checkpoint import Place, check_size
from mmaccel.pipelines.encoded_captions import make_rows
from mmaccel.pipelines.picture_model import stack_rows
from mmaccel.pipelines.pictures import to_images
from mmaccel.samplers.filters import Filters
from mmaccel.tokenizers_vq.grid import Grid

if TYPE_CHECKING:
    from PIL.Image import Image


class WordPictures:
    """A `PictureModel` of three parts.

    Args:
        window: predicts picture tokens, V of `tokenizer`: token after token, or in any order.
        tokenizer: turns tokens into pictures.
        words: turns captions into prompt ids.
    """

    filters = Filters(guidance_scale=2.0)

    def __init__(
        self, window: TokenModel | Denoiser, tokenizer: VisualTokenizer, words: CaptionWords
    ) -> None:
        self.window, self.tokenizer, self.words = window, tokenizer, words
        self.layout = Grid(*tokenizer.grid, tokenizer.vocab_size)
        self.examples: tuple[str, ...] = (words.words[0],)

    @property
    def size(self) -> tuple[int, int]:
        """See `PictureModel.size`."""
        side: int = self.tokenizer.size  # type: ignore[attr-defined]
        return side, side

    def resize(self, size: tuple[int, int]) -> WordPictures:
        """See `PictureModel.resize`; there is one size."""
        check_size(Place(size=size), self.size)
        return self

    def encode(self, caption: str) -> list[int]:
        """See `mmaccel.pipelines.caption_words.CaptionWords.encode`."""
        return self.words.encode(caption)

    def encode_negative(self, caption: str) -> list[int]:
        """A negative caption, in the words of any other."""
        return self.encode(caption)

    def prompt(
        self,
        encoded: Sequence[list[int]],
        guided: bool,
        negatives: Sequence[list[int] | None] | None = None,
    ) -> Prompt:
        """See `PictureModel.prompt`; unconditional rows have the negative or the empty caption."""
        rows = make_rows(encoded, guided, negatives, self.words.unconditional())
        device = self.window.device
        return stack_rows(rows, 2 if guided else 1, self.layout, device, self.words.pad)

    def render(self, tokens: Tensor, captions: Sequence[str], seeds: Sequence[int]) -> list[Image]:
        """See `PictureModel.render`."""
        return to_images(self.tokenizer.decode(tokens))
