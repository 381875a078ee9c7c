"""Moving scenes: reads a clip back against its caption.

Nothing is learned, so a verdict can be checked by hand. The pixels of every frame are named and the
shapes fitted as by the checker of `scenes`; the centroids of an object's pixels, frame after frame,
are its track. A straight line through the track (least squares) gives direction and speed; the
frames in which the object is missing give appearing and vanishing; where one object hits the other,
the motion before and after is read apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from mmaccel.demo.moving_scenes.caption import Reading, Wanted, read_caption
from mmaccel.demo.moving_scenes.layout import COLOURS, DIRECTIONS
from mmaccel.demo.scenes.checker import (
    NAMES,
    classify_pixels,
    core_size,
    find_pieces,
    fit_shape,
    ground_share,
    is_shape,
)
from mmaccel.demo.scenes.layout import BACKGROUNDS
from mmaccel.errors import ShapeError

_CORE = 9  # pixels of core an object must have
_SURPLUS = 25  # pixels of core that make a colour nobody asked for an object
_GROUND = 0.8  # share of the pixels outside objects that show the ground asked for
_MOVES = 0.6  # pixels a frame: slower is rest; the slowest motion has 1.2
_QUICK = 2.5  # pixels a frame: the slow end at 1.8, the quick begin at 3.2
_STRAY = 2.5  # pixels that a centroid may lie off the line of its track
_FITTED = 3  # frames whose shapes are read; most of them decide
_PALETTE = (*COLOURS, *BACKGROUNDS)


@dataclass(frozen=True)
class Verdict:
    """What is right about one clip; `whole` means all the others are.

    Attributes:
        background: the ground asked for, in every frame.
        colours: each colour asked for is there, and no other.
        shapes: of each object, in most frames that were looked at.
        events: each object is there from the first to the last frame, or appears or vanishes as
            asked.
        directions: each object rests or moves straight as asked; one that hits stops, and the one
            that is hit goes on.
        speeds: those that the caption states.
    """

    background: bool
    colours: bool
    shapes: bool
    events: bool
    directions: bool
    speeds: bool

    @property
    def whole(self) -> bool:
        """The whole caption is true."""
        return all(asdict(self).values())


@dataclass(frozen=True)
class Track:
    """Where an object is; `points` is [F, 2], x and y in pixels, NaN where it is missing."""

    points: np.ndarray

    @property
    def seen(self) -> np.ndarray:
        """[F] bool."""
        return ~np.isnan(self.points[:, 0])

    def velocity(self, first: int = 0, last: int | None = None) -> tuple[np.ndarray, float]:
        """Pixels a frame [2] of the line through the frames `first` to `last - 1`, and how far the
        farthest centroid is off it; NaN and 0 with fewer than two centroids.
        """
        frames = np.arange(len(self.points))[first:last]
        points = self.points[first:last]
        frames, points = frames[self.seen[first:last]], points[self.seen[first:last]]
        if len(frames) < 2:
            return np.full(2, np.nan), 0.0
        line = np.polynomial.polynomial.polyfit(frames, points, 1)  # [2, 2]
        off = points - (line[0] + frames[:, None] * line[1])
        return line[1], float(np.hypot(off[:, 0], off[:, 1]).max())


def check_clips(clips: Tensor, captions: Sequence[str]) -> list[Verdict]:
    """Judges clips.

    Args:
        clips: [B, F, 3, 64, 64] float in 0..1.
        captions: B captions of the language, no colour twice in one caption.

    Returns:
        One verdict per clip. A background or speed that the caption leaves open cannot be wrong.

    Raises:
        ShapeError: not B clips.
        OptionError: a caption cannot be read.
    """
    if clips.ndim != 5 or len(clips) != len(captions) or clips.shape[2] != 3:
        raise ShapeError(
            f"clips: expected [{len(captions)}, frames, 3, h, w] for {len(captions)} captions, "
            f"received {list(clips.shape)}."
        )
    return [
        _judge(clip.float(), classify_pixels(clip, _PALETTE), read_caption(caption))
        for clip, caption in zip(clips, captions, strict=True)
    ]


def score_clips(clips: Tensor, captions: Sequence[str]) -> dict[str, float]:
    """Shares of right verdicts, by name, each 0..1 (arguments as `check_clips`)."""
    verdicts = check_clips(clips, captions)
    rows = [{**asdict(v), "whole": v.whole} for v in verdicts]
    return {name: sum(r[name] for r in rows) / len(rows) for name in rows[0]}


def follow(labels: np.ndarray, colour: str) -> tuple[Track, list[np.ndarray | None]]:
    """The track of the object of a colour, and its pixels.

    Args:
        labels: [F, h, w] from `classify_pixels`.
        colour: of the object.

    Returns:
        The track; of each frame the mask [h, w] of its largest piece, None where it is missing.
    """
    points = np.full((len(labels), 2), np.nan)
    masks: list[np.ndarray | None] = []
    for frame, mask in enumerate(labels == NAMES.index(colour)):
        piece = next(iter(find_pieces(mask)), None) if core_size(mask) >= _CORE else None
        if piece is not None and core_size(piece) < _CORE:
            piece = None
        masks.append(piece)
        if piece is not None:
            rows, columns = np.nonzero(piece)
            points[frame] = columns.mean() + 0.5, rows.mean() + 0.5
    return Track(points), masks


def _judge(clip: Tensor, labels: np.ndarray, wanted: Reading) -> Verdict:
    ground = wanted.background
    background = ground is None or all(ground_share(each, ground) >= _GROUND for each in labels)
    found = [follow(labels, each.colour) for each in wanted.objects]
    tracks = [track for track, _ in found]
    if not all(track.seen.any() for track in tracks):
        return Verdict(background, *[False] * 5)
    asked = {each.colour for each in wanted.objects}
    surplus = [_is_surplus(labels, colour) for colour in COLOURS if colour not in asked]
    pairs = list(zip(wanted.objects, found, strict=True))
    return Verdict(
        background=background,
        colours=not any(surplus),
        shapes=all(_has_shape(clip, labels, each, masks) for each, (_, masks) in pairs),
        events=all(_happens(each.event, track) for each, (track, _) in pairs),
        directions=_collide(wanted.objects[0].direction, tracks)
        if wanted.is_hit
        else all(_moves(each.direction, track) for each, (track, _) in pairs),
        speeds=all(_is_fast(each.speed, track) for each, (track, _) in pairs),
    )


def _is_surplus(labels: np.ndarray, colour: str) -> bool:
    """Whether two frames or more show an object of a colour."""
    cores = [core_size(mask) for mask in labels == NAMES.index(colour)]
    return sum(core >= _SURPLUS for core in cores) > 1


def _has_shape(
    clip: Tensor, labels: np.ndarray, wanted: Wanted, masks: list[np.ndarray | None]
) -> bool:
    """Whether most of three frames, spread over those that show the object, have its shape."""
    shown = [frame for frame, mask in enumerate(masks) if mask is not None]
    picked = sorted({shown[k * (len(shown) - 1) // (_FITTED - 1)] for k in range(_FITTED)})
    others = [NAMES.index(colour) for colour in COLOURS if colour != wanted.colour]
    votes: Counter[bool] = Counter()
    for frame in picked:
        mask = masks[frame]
        assert mask is not None
        fit = fit_shape(clip[frame], mask, np.isin(labels[frame], others))
        votes[is_shape(fit, wanted.shape)] += 1
    return votes[True] > votes[False]


def _happens(event: str, track: Track) -> bool:
    """Whether an object comes or goes once as asked, or stays; one missing frame is forgiven."""
    seen = track.seen
    changes = int((seen[1:] != seen[:-1]).sum())
    if event == "appears":
        return changes == 1 and bool(seen[-1])
    if event == "vanishes":
        return changes == 1 and bool(seen[0])
    return int((~seen).sum()) <= 1


def _heading(velocity: np.ndarray) -> str:
    """One of `DIRECTIONS`, "" at rest, "?" for a motion in none of them."""
    if np.isnan(velocity).any():
        return "?"
    axis = int(abs(velocity[1]) > abs(velocity[0]))
    if abs(velocity[axis]) < _MOVES:
        return ""
    if abs(velocity[1 - axis]) > abs(velocity[axis]) / 2:
        return "?"
    step = np.sign(velocity[axis])
    return next(name for name, steps in DIRECTIONS.items() if steps[axis] == step)


def _moves(direction: str, track: Track) -> bool:
    velocity, stray = track.velocity()
    return _heading(velocity) == direction and stray <= _STRAY


def _collide(direction: str, tracks: list[Track]) -> bool:
    """The first object moves and comes to rest, the second rests and then moves the same way."""
    before = [_heading(track.velocity(0, 4)[0]) for track in tracks]
    after = [_heading(track.velocity(-4)[0]) for track in tracks]
    return before == [direction, ""] and after == ["", direction]


def _is_fast(speed: str, track: Track) -> bool:
    velocity, _ = track.velocity()
    pace = float(np.abs(velocity).max())
    return speed == "" or (pace >= _QUICK) == (speed == "quickly")


def stack_frames(frames: Sequence[Tensor]) -> Tensor:
    """Clips [F, h, w, 3] uint8 as the tracker takes them, [B, F, 3, h, w] float in 0..1."""
    return torch.stack(list(frames)).permute(0, 1, 4, 2, 3).float() / 255
