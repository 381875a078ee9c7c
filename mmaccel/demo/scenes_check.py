"""Scenes: reads a picture back against its caption.

Verdicts per picture: is the ground the one asked for, is there exactly one object of each colour
asked for and none of another, are shapes, stated sizes and relations right, and is the whole
caption true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from torch import Tensor

from mmaccel.demo.scenes_caption import Reading, read_caption
from mmaccel.demo.scenes_fit import Fit, fit_shape
from mmaccel.demo.scenes_layout import COLOURS
from mmaccel.demo.scenes_segment import (
    NAMES,
    classify_pixels,
    core_size,
    find_pieces,
    largest_piece,
)
from mmaccel.errors import ShapeError

_CORE = 9  # pixels of core an object must have
# The next five were set with a margin to what real pictures show after the tokenizer (500 of them).
_SECOND = 25  # pixels of core that make a second piece of an asked colour an object of its own
_GROUND = 0.8  # share of the pixels beside objects that show the ground asked for
_EXPLAINED = 0.1  # of the variance around a piece, by the shape laid over it
_EXTENT = 1.2  # of a piece, in diameters of the shape laid over it
_OVERLAP = {"circle": 0.72, "square": 0.65, "triangle": 0.6, "star": 0.6, "ring": 0.5}
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


def ground_share(labels: np.ndarray, ground: str) -> float:
    """Share of the pixels that show no object which show a ground; labels [h, w] from
    `classify_pixels`.
    """
    beside = ~np.isin(labels, [NAMES.index(c) for c in COLOURS])
    return float((labels == NAMES.index(ground)).sum() / max(beside.sum(), 1))


def count_objects(labels: np.ndarray, colour: str) -> int:
    """How many objects of a colour a picture has; labels [h, w] from `classify_pixels`."""
    cores = [core_size(piece) for piece in find_pieces(labels == NAMES.index(colour))]
    return int(any(core >= _CORE for core in cores[:1])) + sum(c >= _SECOND for c in cores[1:])


def _judge(picture: Tensor, labels: np.ndarray, wanted: Reading) -> Verdict:
    ground = wanted.background
    background = ground is None or ground_share(labels, ground) >= _GROUND
    colours = [o.colour for o in wanted.objects]
    counts = {colour: count_objects(labels, colour) for colour in COLOURS}
    if not all(counts[colour] for colour in colours):
        return Verdict(background, False, False, False, False)
    fits = []
    for colour in colours:
        others = np.isin(labels, [NAMES.index(c) for c in colours if c != colour])
        fits.append(fit_shape(picture, largest_piece(labels == NAMES.index(colour)), others))
    return Verdict(
        background,
        all(counts[colour] == (colour in colours) for colour in COLOURS),
        all(is_shape(f, o.shape) for f, o in zip(fits, wanted.objects, strict=True)),
        all(o.size in (None, f.size) for f, o in zip(fits, wanted.objects, strict=True)),
        all(_stands(r, fits[0], f) for r, f in zip(wanted.relations, fits[1:], strict=True)),
    )


def is_shape(fit: Fit, shape: str) -> bool:
    """Whether a piece of the picture is that shape: the best fit, and a good one."""
    return (
        fit.shape == shape
        and fit.overlap >= _OVERLAP[shape]
        and fit.explained >= _EXPLAINED
        and fit.extent <= _EXTENT
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
