"""Types of image to text: answers, and the visual tokens that they were made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from mmaccel.results import ShortRepr, Stats

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, eq=False, repr=False)
class ImageTokens(ShortRepr):
    """The visual tokens of one image, and where they stand in the views that the model reads.

    A view is what the encoder sees at once: the whole image, or one tile of it. The pixels are the
    processor's, before normalisation.

    Attributes:
        kept: `[n]` bool, on the CPU; which of the n tokens stayed to the last layer. A merged token
            counts where it stands for others.
        view: `[n]` int64, the view of each.
        row, column: `[n]` int64, its place in the view's grid; -1 for tokens that are no place, as
            those that end rows, and everywhere where the places are unknown.
        pixels: `[V, height, width, 3]` uint8, the views; None where the places are unknown.
        tile_grid: rows and columns of the views after the first, which are tiles; (0, 0) for none.
    """

    kept: Tensor = field(repr=False)
    view: Tensor = field(repr=False)
    row: Tensor = field(repr=False)
    column: Tensor = field(repr=False)
    pixels: Tensor | None = field(default=None, repr=False)
    tile_grid: tuple[int, int] = (0, 0)

    @property
    def n_all(self) -> int:
        """Visual tokens of the image."""
        return len(self.kept)

    @property
    def n_kept(self) -> int:
        """How many of them stayed."""
        return int(self.kept.sum())


@dataclass(frozen=True, eq=False, repr=False)
class Answer(ShortRepr):
    """One answered question.

    Attributes:
        index: of the question in the list of the call.
        question: what was asked.
        text: the answer.
        seed: of this answer.
        tokens: `[n]` int64, the generated tokens, the end token included, on the CPU.
        is_finished: True if the model ended the answer, False if it was cut at `max_new_tokens`.
        passes: forward passes of the batch that it was answered in, the prompt's included.
        n_visual: visual tokens of its images; 0 where the model's class is not listed.
        n_kept: how many of them stayed to the last layer.
        images: the tokens of each image, in order; empty without `visual_tokens`.
    """

    index: int
    question: str
    text: str
    seed: int
    tokens: Tensor
    is_finished: bool
    passes: int
    n_visual: int
    n_kept: int
    images: list[ImageTokens] = field(default_factory=list)

    def draw_kept(self) -> Image:
        """Draw the patches that stayed; see `mmaccel.pipelines.image_to_text.kept_picture`."""
        from mmaccel.pipelines.image_to_text.kept_picture import draw_kept

        return draw_kept(self.images)


@dataclass(frozen=True, repr=False)
class Answers(ShortRepr):
    """Answers in the order of the questions, and what they cost.

    Attributes:
        answers: one for each question.
        stats: of the decoding, all batches together; `seconds` begins after the encoder.
        seconds: of the whole call, processor and encoder included.
        first_seconds: of these, those until the first tokens of each batch: processor, encoder,
            the prompt's pass and the first pass after it.
    """

    answers: list[Answer]
    stats: Stats
    seconds: float
    first_seconds: float

    def __len__(self) -> int:
        """Number of answers."""
        return len(self.answers)

    def __getitem__(self, index: int) -> Answer:
        """One answer."""
        return self.answers[index]
