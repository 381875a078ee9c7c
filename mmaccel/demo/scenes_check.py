"""Scenes: reads a picture back against its caption.

Three verdicts per picture: is the background the one asked for, are the object colours exactly
those asked for, and is the whole caption true (background, colours, shapes, sizes that are
stated, relations).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from torch import Tensor

from mmaccel.demo.scenes_caption import Reading, read_caption
from mmaccel.demo.scenes_fit import Fit, fit_shape
from mmaccel.demo.scenes_layout import BACKGROUNDS, COLOURS
from mmaccel.demo.scenes_segment import NAMES, classify_pixels, core_size, largest_piece
from mmaccel.errors import ShapeError

_CORE = 9  # pixels of core an object must have
_NEAR = 5.0  # pixels: least distance of two objects told apart by direction


@dataclass(frozen=True)
class Verdict:
    """What is right about one picture; `whole` means all the others are."""

    background: bool
    colours: bool
    shapes: bool
    sizes: bool
    relations: bool

    @property
    def whole(self) -> bool:
        """The whole caption is true."""
        return self.background and self.colours and self.shapes and self.sizes and self.relations


def check_pictures(pictures: Tensor, captions: Sequence[str]) -> list[Verdict]:
    """Judges pictures.

    Args:
        pictures: [B, 3, 64, 64] float in 0..1.
        captions: B captions of the scenes language, no colour twice in one caption.

    Returns:
        One verdict per picture. A background, size or colour that the caption leaves open
        cannot be wrong.

    Raises:
        ShapeError: not B pictures.
        OptionError: a caption cannot be read.
    """
    if pictures.ndim != 4 or len(pictures) != len(captions) or pictures.shape[1] != 3:
        raise ShapeError(
            f"pictures: expected [{len(captions)}, 3, h, w] for {len(captions)} captions, "
            f"received {list(pictures.shape)}."
        )
    labels = classify_pixels(pictures)
    return [
        _judge(p, row, read_caption(c))
        for p, row, c in zip(pictures.float(), labels, captions, strict=True)
    ]


def score_pictures(pictures: Tensor, captions: Sequence[str]) -> dict[str, float]:
    """Shares of right verdicts, by name, each 0..1 (arguments as `check_pictures`)."""
    verdicts = check_pictures(pictures, captions)
    rows = [{**asdict(v), "whole": v.whole} for v in verdicts]
    return {name: sum(r[name] for r in rows) / len(rows) for name in rows[0]}


def found_background(labels: np.ndarray) -> str:
    """The background most pixels show; labels [h, w] from `classify_pixels`."""
    counts = [(labels == NAMES.index(b)).sum() for b in BACKGROUNDS]
    return BACKGROUNDS[int(np.argmax(counts))]


def found_colours(labels: np.ndarray) -> set[str]:
    """Object colours with a solid piece in the picture; labels [h, w] from `classify_pixels`."""
    pieces = {c: largest_piece(labels == NAMES.index(c)) for c in COLOURS}
    return {c for c, piece in pieces.items() if core_size(piece) >= _CORE}


def _judge(picture: Tensor, labels: np.ndarray, wanted: Reading) -> Verdict:
    background = wanted.background in (None, found_background(labels))
    colours = [o.colour for o in wanted.objects]
    found = found_colours(labels)
    if not found.issuperset(colours):
        return Verdict(background, False, False, False, False)
    fits = []
    for colour in colours:
        others = np.isin(labels, [NAMES.index(c) for c in colours if c != colour])
        fits.append(fit_shape(picture, largest_piece(labels == NAMES.index(colour)), others))
    return Verdict(
        background,
        found == set(colours),
        all(f.shape == o.shape for f, o in zip(fits, wanted.objects, strict=True)),
        all(o.size in (None, f.size) for f, o in zip(fits, wanted.objects, strict=True)),
        all(_stands(r, fits[0], f) for r, f in zip(wanted.relations, fits[1:], strict=True)),
    )


def _stands(relation: str, first: Fit, second: Fit) -> bool:
    right, down = second.x - first.x, second.y - first.y
    if relation == "inside":
        return max(abs(right), abs(down)) < second.radius / 2 and first.radius < second.radius
    if max(abs(right), abs(down)) < _NEAR:
        return False
    if abs(down) > abs(right):
        return relation == ("above" if down > 0 else "below")
    return relation == ("left of" if right > 0 else "right of")
