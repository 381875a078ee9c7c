"""ImageTokens: the visual tokens of one image, and which of them stayed."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from mmaccel.results import ShortRepr


@dataclass(frozen=True, eq=False, repr=False)
class ImageTokens(ShortRepr):
    """The visual tokens of one image, and where they stand in the views that the model reads.

    A view is what the encoder sees at once: the whole image, or one tile of it.

    Attributes:
        kept: `[n]` bool, on the CPU; which of the n tokens stayed to the last layer. A merged token
            counts where it stands for others.
        view: `[n]` int64, the view of each.
        row, column: `[n]` int64, its place in the view's grid; -1 for tokens that are no place, as
            those that end rows, and where the places are unknown.
        pixels: `[V, height, width, 3]` uint8, the views as the processor made them, before
            normalisation; None where the places are unknown.
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
        return len(self.kept)

    @property
    def n_kept(self) -> int:
        return int(self.kept.sum())
