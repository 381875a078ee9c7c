"""Prompts of models that draw ImageNet's classes: numbers of classes."""

from __future__ import annotations

from abc import abstractmethod

from mmaccel.checks import show
from mmaccel.errors import OptionError
from mmaccel.pipelines.text_to_image.model import PromptedModel


class ClassPrompts(PromptedModel):
    """A model whose window has ids of classes behind those of its tokens, the last for none."""

    examples: tuple[str, ...] = ("207", "360", "387", "974", "88", "979", "417", "279")
    no_negatives = "whose authors use a learned unconditional row"

    @property
    @abstractmethod
    def n_classes(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """The id of a class label."""
        number = str(text).strip()
        is_short = number.isdecimal() and len(number) < 10  # Python reads no number of any length
        if not is_short or int(number) >= self.n_classes:
            raise OptionError(
                f"prompt: expected the number of a class, 0..{self.n_classes - 1} (ImageNet's "
                f"order), received {show(text)}; write for example 207"
            )
        return [self.window.vocab_size + int(number)]

    def unconditional(self) -> list[int]:
        """The id that stands for no class."""
        return [self.window.vocab_size + self.n_classes]
