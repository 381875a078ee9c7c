"""Moving scenes: clips by seed, what happens in them, captions that read back, and the tracker."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from mmaccel.catalog import CLIP_MODELS
from mmaccel.demo.moving_scenes.caption import read_caption, write_caption
from mmaccel.demo.moving_scenes.data import WORDS, make_captions, make_clips
from mmaccel.demo.moving_scenes.layout import DIRECTIONS, N_FRAMES, SPEEDS, draw_moving_scene
from mmaccel.demo.moving_scenes.tracker import Track, check_clips, score_clips
from mmaccel.demo.scenes.layout import CANVAS, generator
from mmaccel.errors import OptionError, ShapeError

SCENES = [draw_moving_scene(generator(7, k)) for k in range(300)]
_, CAPTIONS, DRAWN = make_clips(11, range(40))
CLIPS = DRAWN.float() / 255


def test_a_clip_depends_on_seed_and_index_alone() -> None:
    _, captions, clips = make_clips(5, [3, 9, 4])
    _, alone, clip = make_clips(5, [9])
    assert captions[1] == alone[0] and torch.equal(clips[1], clip[0])
    assert make_captions(5, [3, 9, 4]) == captions
    assert clips.shape == (3, N_FRAMES, 3, CANVAS, CANVAS) and clips.dtype == torch.uint8
    assert not torch.equal(clips[0], make_clips(6, [3])[2][0])


def test_objects_stay_inside_and_apart() -> None:
    for scene in SCENES:
        for actor in scene.actors:
            points = np.array(actor.track)
            assert points.shape == (N_FRAMES, 2)
            assert points.min() >= actor.radius and points.max() <= CANVAS - actor.radius
        if len(scene.actors) == 2:
            first, second = scene.actors
            gaps = [math.dist(a, b) for a, b in zip(first.track, second.track, strict=True)]
            assert min(gaps) >= first.radius + second.radius - 1e-6
            assert first.colour != second.colour


def test_motion_is_what_the_words_say() -> None:
    kinds = set()
    for scene in SCENES:
        for actor in scene.actors:
            steps = np.diff(np.array(actor.track), axis=0)
            kinds.add((actor.direction, actor.speed, actor.event, scene.is_hit))
            if scene.is_hit:
                continue
            wanted = np.array(DIRECTIONS.get(actor.direction, (0, 0)))
            pace = np.abs(steps).max()
            assert np.allclose(steps, wanted * pace)
            low, high = SPEEDS.get(actor.speed, (0, 0))
            assert low <= pace + 1e-9 and pace <= high + 1e-9
            changes = int((np.diff(np.array(actor.seen, dtype=int)) != 0).sum())
            assert changes == bool(actor.event)
            assert actor.seen[-1] == (actor.event != "vanishes")
    assert len(kinds) > 20  # every direction, speed and event comes


def test_a_hit_passes_the_motion_on() -> None:
    hits = [scene for scene in SCENES if scene.is_hit]
    assert len(hits) > 20
    for scene in hits:
        first, second = (np.diff(np.array(actor.track), axis=0) for actor in scene.actors)
        moved = [np.abs(steps).max(1) > 1e-9 for steps in (first, second)]
        assert (moved[0] ^ moved[1]).all()  # one of them moves at a time
        assert moved[0][0] and moved[1][-1]
        assert np.allclose(first[0], second[-1])


def test_captions_read_back() -> None:
    for index, scene in enumerate(SCENES):
        caption = write_caption(generator(8, index), scene)
        assert set(caption.split()) <= set(WORDS)
        reading = read_caption(caption)
        assert reading.is_hit == scene.is_hit
        assert reading.background in (None, scene.background)
        for wanted, actor in zip(reading.objects, scene.actors, strict=True):
            assert (wanted.colour, wanted.shape) == (actor.colour, actor.shape)
            assert (wanted.direction, wanted.event) == (actor.direction, actor.event)
            assert wanted.speed in ("", actor.speed)


@pytest.mark.parametrize("caption", ["red", "a circle moves left", "moves left", "a red dog rests"])
def test_what_is_no_sentence_is_refused(caption: str) -> None:
    with pytest.raises(OptionError, match="caption: expected"):
        read_caption(caption)


def test_the_ground_stays_and_the_grain_does_not() -> None:
    scenes, _, clips = make_clips(5, range(30))
    index = next(
        k
        for k, scene in enumerate(scenes)
        if len(scene.actors) == 1 and not scene.actors[0].direction
    )
    first, last = clips[index, 0].float(), clips[index, 1].float()
    assert not torch.equal(first, last)
    assert float((first - last).abs().mean()) < 12


def test_real_clips_are_right() -> None:
    assert score_clips(CLIPS, CAPTIONS)["whole"] >= 0.97


SWAPS = {  # verdict -> words, and those that are put for them
    "background": {" grass": " snow", " sand": " water", " snow": " grass", " water": " sand"},
    "shapes": {"circle": "square", "square": "ring", "ring": "triangle", "triangle": "circle"},
    "directions": {"left": "right", "right": "up", "up": "down", "down": "left"},
    "speeds": {"slowly": "quickly", "quickly": "slowly"},
    "events": {"vanishes": "appears", "appears": "vanishes"},
}


@pytest.mark.parametrize("verdict", list(SWAPS))
def test_a_wrong_word_fails_its_own_verdict(verdict: str) -> None:
    tested = caught = 0
    for old, new in SWAPS[verdict].items():
        for k, caption in enumerate(CAPTIONS):
            wrong = caption.replace(old, new)
            if wrong == caption or tested >= 20:
                continue
            tested += 1
            (checked,) = check_clips(CLIPS[k : k + 1], [wrong])
            caught += not getattr(checked, verdict) and not checked.whole
    assert tested >= 8
    assert caught >= 0.95 * tested


def freeze(clip: Tensor) -> Tensor:
    return clip[:1].expand_as(clip)


def shuffle(clip: Tensor) -> Tensor:
    return clip[torch.tensor([0, 5, 2, 8, 4, 1, 6, 3, 7, 9])]


@pytest.mark.parametrize("damage", [freeze, shuffle, lambda clip: clip.flip(0)])
def test_damaged_motion_is_seen(damage: Callable[[Tensor], Tensor]) -> None:
    moving = [k for k, text in enumerate(CAPTIONS) if "quickly" in text and "and" not in text]
    assert len(moving) >= 4
    for k in moving:
        (checked,) = check_clips(damage(CLIPS[k])[None], [CAPTIONS[k]])
        assert not checked.directions


def test_a_colour_nobody_asked_for_is_wrong() -> None:
    k = next(k for k, text in enumerate(CAPTIONS) if " and a " in text or " and the " in text)
    first = CAPTIONS[k].split(" and ")[0]
    assert not check_clips(CLIPS[k : k + 1], [first])[0].colours


def test_a_track_by_hand() -> None:
    points = np.array([[1.0, 2.0], [np.nan, np.nan], [5.0, 2.0], [7.0, 2.5]])
    track = Track(points)
    assert track.seen.tolist() == [True, False, True, True]
    velocity, stray = track.velocity()
    assert velocity[0] == pytest.approx(2.0) and 0 < stray < 0.4
    assert np.isnan(track.velocity(0, 2)[0]).all()


def test_clips_and_captions_must_agree() -> None:
    with pytest.raises(ShapeError, match="clips: expected"):
        check_clips(CLIPS[:2], CAPTIONS[:1])


def test_the_examples_of_the_command_are_sentences_of_the_language() -> None:
    (demo,) = CLIP_MODELS.values()
    for text in demo.examples:
        assert set(text.split()) <= set(WORDS)
        assert read_caption(text).objects
