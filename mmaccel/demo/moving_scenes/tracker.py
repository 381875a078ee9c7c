"""Clips: reads a clip back against its caption.

The pixels of every frame are named and the shapes fitted as by the checker of `scenes`; an object's
centroids are its track. A straight line through it (least squares) gives direction and speed, the
frames without the object appearing and vanishing; where one object hits the other, the motion
before and after is read apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mmaccel.demo.moving_scenes.data import COLOURS, DIRECTIONS, read_caption
from mmaccel.demo.scenes.checker import (
    CORE,
    NAMES,
    SURPLUS,
    Judgement,
    classify_pixels,
    core_size,
    find_pieces,
    fit_shape,
    has_ground,
)
from mmaccel.demo.scenes.data import Reading, Wanted
from mmaccel.demo.scenes.layout import BACKGROUNDS

_MOVES = 0.6  # pixels a frame: slower is rest; the slowest motion has 1.2
_QUICK = 2.5  # pixels a frame: the slow end at 1.8, the quick begin at 3.2
_STRAY = 2.5  # pixels that a centroid may lie off the line of its track
_FITTED = 3  # frames whose shapes are read; most of them decide


@dataclass(frozen=True)
class Verdict(Judgement):
    """What is right about one clip."""

    background: bool  # in every frame
    colours: bool  # each colour asked for is there, and no other
    shapes: bool  # of each object, in most frames that were looked at
    events: bool  # each object is there throughout, or appears or vanishes as asked
    directions: bool  # each rests or moves straight; one that hits stops, and the other goes on
    speeds: bool  # those that the caption states


@dataclass(frozen=True)
class Track:
    """Where an object is."""

    points: np.ndarray  # [F, 2], x and y in pixels, NaN where it is missing
    masks: dict[int, np.ndarray]  # of its pixels [h, w], of each frame that shows it

    def velocity(self, first: int = 0, last: int | None = None) -> tuple[np.ndarray, float]:
        """Pixels a frame [2] of the line through the frames `first` to `last - 1`, and how far the
        farthest centroid is off it; NaN and 0 with fewer than two centroids.
        """
        points = self.points[first:last]
        frames = np.flatnonzero(~np.isnan(points[:, 0]))
        points = points[frames]
        if len(frames) < 2:
            return np.full(2, np.nan), 0.0
        line = np.polynomial.polynomial.polyfit(frames, points, 1)  # [2, 2]
        off = points - (line[0] + frames[:, None] * line[1])
        return line[1], float(np.hypot(off[:, 0], off[:, 1]).max())

    def heading(self, first: int = 0, last: int | None = None) -> str:
        """One of `DIRECTIONS`, "" at rest, "?" for a motion in none of them."""
        velocity, _ = self.velocity(first, last)
        if np.isnan(velocity).any():
            return "?"
        axis = int(abs(velocity[1]) > abs(velocity[0]))
        if abs(velocity[axis]) < _MOVES:
            return ""
        if abs(velocity[1 - axis]) > abs(velocity[axis]) / 2:
            return "?"
        step = np.sign(velocity[axis])
        return next(name for name, steps in DIRECTIONS.items() if steps[axis] == step)


def check_clips(clips: Tensor, captions: Sequence[str]) -> list[Verdict]:
    """Judges clips [B, F, 3, 64, 64] float in 0..1 by captions, none with a colour twice."""
    pairs = zip(clips, captions, strict=True)
    return [_judge(clip.float(), read_caption(caption)) for clip, caption in pairs]


def _judge(clip: Tensor, caption: Reading) -> Verdict:
    labels = classify_pixels(clip, (*COLOURS, *BACKGROUNDS))
    background = all(has_ground(each, caption.background) for each in labels)
    pairs = [(each, follow(labels, each.colour)) for each in caption.objects]
    tracks = [track for _, track in pairs]
    if not all(track.masks for track in tracks):
        return Verdict(background, *[False] * 5)
    asked = {each.colour for each in caption.objects}
    if caption.is_hit:
        directions = _collide(caption.objects[0].direction, tracks)
    else:
        directions = all(_moves(each.direction, track) for each, track in pairs)
    return Verdict(
        background=background,
        colours=not any(_is_surplus(labels, c) for c in COLOURS if c not in asked),
        shapes=all(_has_shape(clip, labels, each, track) for each, track in pairs),
        events=all(_happens(each.event, track) for each, track in pairs),
        directions=directions,
        speeds=all(_is_fast(each.speed, track) for each, track in pairs),
    )


def follow(labels: np.ndarray, colour: str) -> Track:
    """The track of the largest piece of a colour, in labels [F, h, w] from `classify_pixels`."""
    points = np.full((len(labels), 2), np.nan)
    masks = {}
    for frame, mask in enumerate(labels == NAMES.index(colour)):
        pieces = find_pieces(mask) if core_size(mask) >= CORE else []
        if pieces and core_size(pieces[0]) >= CORE:
            masks[frame] = pieces[0]
            rows, columns = np.nonzero(pieces[0])
            points[frame] = columns.mean() + 0.5, rows.mean() + 0.5
    return Track(points, masks)


def _is_surplus(labels: np.ndarray, colour: str) -> bool:
    """Whether two frames or more show an object of a colour."""
    cores = [core_size(mask) for mask in labels == NAMES.index(colour)]
    return sum(core >= SURPLUS for core in cores) > 1


def _has_shape(clip: Tensor, labels: np.ndarray, wanted: Wanted, track: Track) -> bool:
    """Whether most of three frames, spread over those that show the object, have its shape."""
    shown = list(track.masks)
    picked = {shown[k * (len(shown) - 1) // (_FITTED - 1)] for k in range(_FITTED)}
    others = [NAMES.index(colour) for colour in COLOURS if colour != wanted.colour]
    fits = [fit_shape(clip[f], track.masks[f], np.isin(labels[f], others)) for f in picked]
    return 2 * sum(fit.is_shape(wanted.shape) for fit in fits) > len(fits)


def _happens(event: str, track: Track) -> bool:
    """Whether an object comes or goes once as asked, or stays; one missing frame is forgiven."""
    seen = ~np.isnan(track.points[:, 0])
    changes = int((seen[1:] != seen[:-1]).sum())
    if event:
        return changes == 1 and bool(seen[-1 if event == "appears" else 0])
    return int((~seen).sum()) <= 1


def _moves(direction: str, track: Track) -> bool:
    _, stray = track.velocity()
    return track.heading() == direction and stray <= _STRAY


def _collide(direction: str, tracks: list[Track]) -> bool:
    """The first object moves and comes to rest, the second rests and then moves the same way."""
    before = [track.heading(0, 4) for track in tracks]
    after = [track.heading(-4) for track in tracks]
    return before == [direction, ""] and after == ["", direction]


def _is_fast(speed: str, track: Track) -> bool:
    velocity, _ = track.velocity()
    pace = float(np.abs(velocity).max())
    return speed == "" or (pace >= _QUICK) == (speed == "quickly")
