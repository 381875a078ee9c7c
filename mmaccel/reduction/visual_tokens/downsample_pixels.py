"""Downsampling of the image, so that the encoder makes fewer tokens: a control. VTC-Bench (2026),
whose models were trained on several sizes, finds that it beats many methods behind the encoder.

Departures: what is averaged is the processor's result (each tile by itself), and tokens have the
positions of their places in the full grid. An image that was shrunk before its processor may be cut
into fewer tiles, which is another control.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmaccel.reduction.visual_tokens.contract import Stage, TokenReducer


@dataclass(frozen=True)
class DownsamplePixels(TokenReducer):
    """Averages the pixels of every image, tile or frame before the encoder, which then makes fewer
    tokens: a control. Both sides shrink to whole patches, so that counts are near those asked for;
    it works under `attach` alone, and has no plan.

    Loses: most where an encoder was trained on one size. Chameleon is refused; videos of
    LLaVA-OneVision keep all features.
    Figures: `scenes-vqa`, 22 % kept: 29.0 points lost of 97.0.
    """

    stage: ClassVar[Stage] = "pixels"

    needs = frozenset({"pixels"})

    def shrink(self, rows: int, columns: int) -> tuple[int, int]:
        """The smaller grid of an image with a grid of `rows` x `columns` tokens."""
        keep = self.keep
        if keep is None:
            assert self.n_keep is not None
            keep = min(1.0, self.n_keep / (rows * columns))
        scale = keep**0.5
        return max(1, round(rows * scale)), max(1, round(columns * scale))
