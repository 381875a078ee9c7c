"""Layout of image tokens: slots of a sequence in rows and frames, with structural tokens."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

import torch
from torch import Tensor

from mmaccel.checks import Checked, within

_IDS = "check the model's vocabulary"


@dataclass(frozen=True)
class Grid(Checked):
    """Raster order, with an optional row-end token per row and image-end token per image.

    Args:
        rows: h.
        width: w, image tokens per row.
        vocab_size: V of the model.
        tokens: ids `[lowest, highest + 1)` that image slots allow; None allows all.
        row_end: id that closes each row, or None.
        image_end: id that closes the image, or None.

    Raises:
        OptionError: an empty grid, or ids outside the vocabulary.
    """

    rows: int = within(MISSING, 1, hint="give the token grid")
    width: int = within(MISSING, 1, hint="give the token grid")
    vocab_size: int = within(MISSING, 1, hint="give the model's")
    tokens: tuple[int, int] | None = within(None, 0, "vocab_size", _IDS, ascends=True)
    row_end: int | None = within(None, 0, "vocab_size", _IDS, below_high=True)
    image_end: int | None = within(None, 0, "vocab_size", _IDS, below_high=True)

    @property
    def columns(self) -> int:
        """Slots per row, its row-end token included."""
        return self.width + (self.row_end is not None)

    @property
    def frame(self) -> int:
        """Slots per image, structural tokens included."""
        return self.rows * self.columns + (self.image_end is not None)

    def forced(self, slots: Tensor) -> Tensor | None:
        """Structural token at slots `[B, W]`, -1 where free, `[B, W]`; or None."""
        if self.row_end is None and self.image_end is None:
            return None
        inside = slots % self.frame
        known = torch.full_like(slots, -1)
        if self.row_end is not None:
            known = torch.where(inside % self.columns == self.width, self.row_end, known)
        if self.image_end is not None:
            known = torch.where(inside == self.frame - 1, self.image_end, known)
        return known

    def allowed(self, slots: Tensor) -> Tensor | None:
        """Boolean `[V]`, True for image tokens; None if all are. `forced` takes precedence."""
        if self.tokens is None or self.tokens == (0, self.vocab_size):
            return None
        ids = torch.arange(self.vocab_size, device=slots.device)
        return (ids >= self.tokens[0]) & (ids < self.tokens[1])
