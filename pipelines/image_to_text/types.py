"""Types of image to text: answers, and the visual tokens that they were made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from mmaccel.pipelines.image_to_text.image_tokens import ImageTokens
from mmaccel.results import ShortRepr, Stats

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, eq=False, repr=False)
class Answer(ShortRepr):
    """One answered question.

    Attributes:
        index: of the question in the list of the call.
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
        """Draw the patches that stayed."""
        from mmaccel.pipelines.image_to_text.kept_picture import draw_kept

        return draw_kept(self.images)


@dataclass(frozen=True, repr=False)
class Answers(ShortRepr):
    """Answers in the order of the questions, and what they cost.

    Attributes:
        stats: of the decoding, all batches together; `seconds` begins after the encoder.
        seconds: of the whole call, processor and encoder included.
        first_seconds: of these, those until the first tokens of each batch.
    """

    answers: list[Answer]
    stats: Stats
    seconds: float
    first_seconds: float

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, index: int) -> Answer:
        return self.answers[index]
