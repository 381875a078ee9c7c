"""Features of moving scenes and of voices: what heads are to say, and damage that distances see."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from mmaccel.demo.moving_scenes.data import make_clips
from mmaccel.demo.moving_scenes.features import (
    REFERENCE_SEED,
    ClipFeatures,
    draw_reference_clips,
    extract_clip_features,
)
from mmaccel.demo.moving_scenes.layout import Actor, MovingScene, draw_moving_scene
from mmaccel.demo.scenes.layout import generator
from mmaccel.demo.voices.features import (
    RATE,
    STEP,
    WINDOW,
    cut_windows,
    extract_speech_features,
)
from mmaccel.evaluation.quality.frechet import frechet_of
from scripts.training import voices_features as speech
from scripts.training.moving_scenes_features import (
    add_noise,
    freeze,
    make_targets,
    measure_accuracy,
    mirror,
    reverse,
    shuffle,
    turn_back,
)

COUNT = 150  # clips on a side


def thing(colour: str, direction: str, event: str, x: tuple[float, float]) -> Actor:
    track = tuple((x[0] + k * (x[1] - x[0]) / 9, 16.0) for k in range(10))
    pace = "slowly" if direction else ""
    return Actor(colour, "ring", direction, pace, event, 8.0, 0.0, track, (True,) * 10)


def scene(*actors: Actor, is_hit: bool = False) -> MovingScene:
    return MovingScene(actors, is_hit, "water", 0.0, 1.0, 0.0, 0.0, 0.01)


@pytest.fixture(scope="module")
def drawn() -> Tensor:
    """Clips that no training saw."""
    return draw_reference_clips(0, 2 * COUNT)


@pytest.fixture(scope="module")
def seen(drawn: Tensor) -> np.ndarray:
    """Features of the first half of the clips."""
    return see(drawn[:COUNT])


def see(clips: Tensor) -> np.ndarray:
    """Features `[N, 50]` of clips."""
    features: np.ndarray = extract_clip_features(clips).numpy()
    return features


def test_targets_by_hand() -> None:
    left = thing("green", "left", "appears", (48, 16))
    targets = make_targets([scene(left, thing("white", "", "", (32, 32)))])
    assert targets["ground"].tolist() == [2] and targets["hit"].tolist() == [0]
    assert targets["shapes"].tolist() == [[4, 3, 4, 4, 4, 3]]  # 4: no object of this colour
    assert targets["directions"].tolist() == [[4, 0, 4, 4, 4, 4]]
    assert targets["speeds"].tolist() == [[2, 0, 2, 2, 2, 2]]
    assert targets["events"].tolist() == [[0, 1, 0, 0, 0, 0]]
    assert targets["ways"][0, 1].tolist() == [0.25, -0.25, -0.25, -0.25]


def test_mirrored_and_reversed_clips_have_the_facts_of_what_they_show() -> None:
    clips = torch.arange(2 * 10 * 8).view(2, 10, 1, 1, 8)
    alone = scene(thing("green", "left", "appears", (48, 16)))
    pair = scene(thing("green", "left", "", (48, 16)), thing("red", "", "", (8, 8)), is_hit=True)
    wanted = make_targets([alone, pair])
    every = torch.tensor([True, True])
    turned, facts = mirror(clips, wanted, every)
    assert torch.equal(turned, clips.flip(-1))
    assert facts["directions"][:, 1].tolist() == [1, 1]  # right
    assert facts["ways"][0, 1].tolist() == [-0.25, -0.25, 0.25, -0.25]
    back, facts = turn_back(clips, wanted, every)
    assert torch.equal(back[0], clips[0].flip(0)) and torch.equal(back[1], clips[1])
    assert facts["directions"][:, 1].tolist() == [1, 0]
    assert facts["events"][0, 1] == 2  # it vanishes
    assert facts["ways"][0, 1].tolist() == [-0.25, -0.25, 0.25, -0.25]


def test_standardising_does_not_change_what_is_read(drawn: Tensor) -> None:
    torch.manual_seed(0)
    model, clips = ClipFeatures().eval(), drawn[:20]
    before = model.read(model(clips))
    model.standardise(clips)
    features = model(clips)
    assert torch.allclose(features.mean(0), torch.zeros(50), atol=1e-4)
    assert torch.allclose(features.std(0), torch.ones(50), atol=1e-4)
    for name, predicted in model.read(features).items():
        assert torch.allclose(predicted, before[name], atol=1e-4)


def test_the_shipped_network_reads_unseen_clips() -> None:
    right = measure_accuracy(60)
    assert right["ground"] > 0.95 and right["colours"] > 0.85 and right["hit"] > 0.85
    assert right["directions"] > 0.6 and right["events"] > 0.8  # guesses: 0.3 and 0.66
    assert right["speeds"] > 0.7 and right["shapes"] > 0.35  # guesses: 0.43 and 0.25


def test_a_clip_does_not_depend_on_its_batch(drawn: Tensor) -> None:
    features = extract_clip_features(drawn[:10])
    assert torch.allclose(features[7:8], extract_clip_features(drawn[7:8]), atol=1e-4)
    assert torch.allclose(features[:4], extract_clip_features(drawn[:4].float() / 255), atol=1e-4)


@pytest.mark.parametrize(
    ("damage", "amounts"),
    [(add_noise, (0.05, 0.1, 0.2)), (freeze, (0.5, 0.75, 1.0)), (shuffle, (0.5, 0.75, 1.0))],
)
def test_distances_of_clips_rise_with_damage(
    drawn: Tensor,
    seen: np.ndarray,
    damage: Callable[[Tensor, float], Tensor],
    amounts: tuple[float, ...],
) -> None:
    assert frechet_of(seen, seen).distance < 1e-6
    others = drawn[COUNT:]
    damaged = [others, *(damage(others, amount) for amount in amounts)]
    found = [frechet_of(seen, see(clips)).distance for clips in damaged]
    assert found == sorted(found) and found[-1] > 1.3 * found[0]


def test_clips_played_backwards_are_far_from_those_of_one_direction() -> None:
    """A set of all directions is the same backwards; one in which all move left is not."""
    scenes = ((k, draw_moving_scene(generator(REFERENCE_SEED, k))) for k in range(1500))
    alone = [k for k, each in scenes if [a.direction for a in each.actors] == ["left"]]
    clips = make_clips(REFERENCE_SEED, alone[:160])[2]
    first, second = see(clips[:80]), clips[80:]
    damaged = [reverse(second, share) for share in (0.0, 0.5, 1.0)]
    found = [frechet_of(first, see(part)).distance for part in damaged]
    assert found == sorted(found) and found[-1] > 1.3 * found[0]


def hum(seed: int) -> Tensor:
    """A voice-like sound of 1.3 s: harmonics of a gliding pitch in vowels, and hissing."""
    rng = np.random.default_rng(seed)
    time = np.arange(13 * RATE // 10) / RATE
    pitch = rng.uniform(90, 220) * (1 + 0.1 * np.sin(2 * np.pi * rng.uniform(1, 3) * time))
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    vowel = (time * rng.uniform(4, 7)).astype(int)
    formants = rng.uniform((300, 900), (800, 2600), (vowel[-1] + 1, 2))
    sound = np.zeros(len(time))
    for k in range(1, 25):
        off = (k * pitch[:, None] - formants[vowel]) / 300
        sound += np.exp(-(off**2)).sum(1) * np.sin(k * phase)
    hiss = rng.standard_normal(len(time)) * (vowel % 3 == 2)
    return torch.from_numpy(0.06 * sound + 0.02 * hiss).float()


def hear(sounds: list[Tensor]) -> np.ndarray:
    """Features `[N, 64]` of the windows of sounds."""
    features: np.ndarray = torch.cat([extract_speech_features(sound) for sound in sounds]).numpy()
    return features


@pytest.fixture(scope="module")
def heard() -> tuple[np.ndarray, list[Tensor], float]:
    """Features of one set of sounds, another set, and how far that is."""
    sounds = [hum(k) for k in range(40)]
    first = hear(sounds[:20])
    return first, sounds[20:], frechet_of(first, hear(sounds[20:])).distance


@pytest.mark.parametrize(
    ("damage", "amounts"),
    [
        (speech.add_noise, (0.01, 0.05, 0.2)),
        (speech.low_pass, (7000, 2000, 1000)),
        (speech.change_speed, (1.2, 1.5, 2.0)),
    ],
)
def test_distances_of_speech_rise_with_damage(
    heard: tuple[np.ndarray, list[Tensor], float],
    damage: Callable[[Tensor, float], Tensor],
    amounts: tuple[float, ...],
) -> None:
    first, second, whole = heard
    assert frechet_of(first, first).distance < 1e-6
    damaged = [hear([damage(sound, amount) for sound in second]) for amount in amounts]
    found = [whole, *(frechet_of(first, features).distance for features in damaged)]
    assert found == sorted(found) and found[-1] > 1.5 * found[0]


def test_windows_cover_a_sound_and_silence_follows_a_short_one() -> None:
    sound = torch.arange(WINDOW + 2 * STEP + 5).float()
    windows = cut_windows(sound)
    assert windows.shape == (3, WINDOW) and windows[:, 0].tolist() == [0, STEP, 2 * STEP]
    short = cut_windows(sound[:7])
    assert short.shape == (1, WINDOW) and short[0, :7].tolist() == list(range(7))
    assert not short[0, 7:].any()
    together = extract_speech_features(hum(0))
    alone = extract_speech_features(hum(0)[STEP : STEP + WINDOW])
    assert torch.allclose(together[1:2], alone, atol=1e-4)
