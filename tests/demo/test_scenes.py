"""Stills and clips: the same from a seed for ever, captions that read back, verdicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.catalog import CLIP_MODELS, MODELS
from mmaccel.demo.moving_scenes import data as clip_data
from mmaccel.demo.moving_scenes.tracker import check_clips
from mmaccel.demo.scenes import data
from mmaccel.demo.scenes.checker import check_images
from mmaccel.demo.scenes.layout import SHAPES, Thing, draw_scene, generator
from mmaccel.demo.scenes.render import COLOUR_RGB, draw_noise, render
from mmaccel.errors import OptionError

WORLDS: dict[str, tuple[data.World, Any]] = {
    "stills": (data.STILLS, data),
    "clips": (clip_data.CLIPS, clip_data),
}
MADE = {name: world.make(11, range(60)) for name, (world, _) in WORLDS.items()}


def judge(name: str, frames: Tensor, captions: list[str]) -> list[Any]:
    """Verdicts on frames [B, F, 3, 64, 64] in 0..1."""
    if name == "stills":
        return list(check_images(frames[:, 0], captions))
    return list(check_clips(frames, captions))


@pytest.mark.parametrize("name", WORLDS)
def test_a_scene_depends_on_seed_and_index_alone(name: str) -> None:
    world, module = WORLDS[name]
    scenes, captions, frames = world.make(5, [3, 9, 4])
    alone = world.make(5, [9])
    assert scenes[1:2] == alone[0] and captions[1:2] == alone[1]
    assert torch.equal(frames[1:2], alone[2]) and frames.dtype == torch.uint8
    assert frames.shape == (3, world.n_frames, 3, 64, 64)
    assert module.make_captions(5, [3, 9, 4]) == captions
    assert not torch.equal(frames[0], world.make(6, [3])[2][0])
    resting = frames[:, [0, -1]].float()
    assert float((resting[:, 0] - resting[:, 1]).abs().median()) < 12  # the ground stays


@pytest.mark.parametrize("name", WORLDS)
def test_captions_read_back_to_their_scene(name: str) -> None:
    _, module = WORLDS[name]
    for scene, text in zip(*MADE[name][:2], strict=True):
        assert set(text.split()) <= set(module.WORDS)
        reading = module.read_caption(text)
        assert (reading.relations, reading.is_hit) == (scene.relations, scene.is_hit)
        assert reading.background in (None, scene.background)
        for wanted, thing in zip(reading.objects, scene.objects, strict=True):
            assert (wanted.colour, wanted.shape) == (thing.colour, thing.shape)
            assert (wanted.direction, wanted.event) == (thing.direction, thing.event)
            assert wanted.size in (None, thing.size) and wanted.speed in ("", thing.speed)
    for text in {**MODELS, **CLIP_MODELS}[{"stills": "scenes"}.get(name, "moving-scenes")].examples:
        assert module.read_caption(text).objects
    for text in ("red", "a circle", "a red dog", "on grass", "a circle moves left"):
        with pytest.raises(OptionError, match="caption: expected"):
            module.read_caption(text)


SWAPS = {  # verdict -> words, and those that are put for them
    "background": {" grass": " snow", " sand": " water", " snow": " grass", " water": " sand"},
    "colours": {"red": "blue", "green": "purple", "yellow": "red", "white": "green"},
    "shapes": {"circle": "square", "square": "ring", "ring": "triangle", "triangle": "circle"},
    "sizes": {"small": "large", "large": "small", "little": "big"},
    "relations": {"above": "below", "left of": "right of", "inside": "above", "under": "over"},
    "directions": {"left": "right", "right": "up", "up": "down", "down": "left"},
    "speeds": {"slowly": "quickly", "quickly": "slowly"},
    "events": {"vanishes": "appears", "appears": "vanishes"},
}


@pytest.mark.parametrize("name", ["stills", pytest.param("clips", marks=pytest.mark.slow)])
def test_real_frames_are_right_and_a_wrong_word_fails_its_own_verdict(name: str) -> None:
    _, captions, frames = MADE[name]
    pixels = frames.float() / 255
    verdicts = judge(name, pixels, captions)
    assert sum(verdict.whole for verdict in verdicts) >= 0.97 * len(verdicts)
    assert sum(verdict.background for verdict in verdicts) >= 0.99 * len(verdicts)
    for verdict in vars(verdicts[0]):
        tested = caught = 0
        for old, new in SWAPS[verdict].items():
            for k, text in enumerate(captions):
                wrong = text.replace(old, new)
                if wrong == text or tested >= 16 or (verdict == "colours" and new in text):
                    continue
                (checked,) = judge(name, pixels[k : k + 1], [wrong])
                tested += 1
                caught += not getattr(checked, verdict) and not checked.whole
        assert tested >= 6 and caught >= 0.9 * tested, verdict


@pytest.mark.parametrize("damage", [lambda c: c[:1].expand_as(c), lambda c: c.flip(0)])
def test_damaged_motion_is_seen(damage: Callable[[Tensor], Tensor]) -> None:
    _, captions, frames = MADE["clips"]
    moving = [k for k, text in enumerate(captions) if "quickly" in text and "and" not in text]
    assert len(moving) >= 4
    for k in moving:
        clip = damage(frames[k].float() / 255)[None]
        assert not check_clips(clip, [captions[k]])[0].directions


def drawn(ground: str, *things: Thing) -> Tensor:
    """An image [1, 3, 64, 64] with these objects and an ordinary ground."""
    rng = generator(99, 5)
    scene = replace(draw_scene(rng), objects=things, relations=(), background=ground)
    return render([scene], [draw_noise(rng)])[:, 0].float() / 255


RED = Thing("red", "circle", ((18, 18),), 9, 0.0)
BLUE = Thing("blue", "square", ((40, 44),), 13.5, 0.0)
CAPTION = ["a red circle above a blue square on grass"]


def test_objects_too_many_and_bands_of_grounds_are_wrong() -> None:
    assert check_images(drawn("grass", RED, BLUE), CAPTION)[0].whole
    for extra in (replace(RED, shape="star"), replace(RED, colour="white")):
        image = drawn("grass", RED, BLUE, replace(extra, track=((50, 15),)))
        assert not check_images(image, CAPTION)[0].colours
    image = drawn("grass", RED, BLUE)
    image[:, :, 22:40] = drawn("sand", RED, BLUE)[:, :, 22:40]
    image[:, :, 40:] = drawn("night", RED, BLUE)[:, :, 40:]
    assert not check_images(image, CAPTION)[0].background


MALFORMED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "half disc": lambda x, y: ((x - 32) ** 2 + (y - 32) ** 2 < 15**2) & (y > 30),
    "disc with a tail": lambda x, y: (
        ((x - 20) ** 2 + (y - 32) ** 2 < 13**2) | ((x > 20) & (x < 58) & ((y - 32).abs() < 2))
    ),
    "L": lambda x, y: (
        ((x - 25).abs() < 4) & ((y - 32).abs() < 13) | ((y - 42).abs() < 4) & ((x - 32).abs() < 12)
    ),
    "ellipse": lambda x, y: ((x - 32) / 20) ** 2 + ((y - 32) / 9) ** 2 < 1,
}


def test_malformed_objects_pass_as_no_shape() -> None:
    y, x = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    for shape in MALFORMED.values():
        image = drawn("grass", replace(RED, track=((1000, 1000),)))
        for channel, value in enumerate(COLOUR_RGB["red"]):
            image[0, channel][shape(x, y)] = value
        for name in SHAPES:
            assert not check_images(image, [f"a red {name} on grass"])[0].whole
