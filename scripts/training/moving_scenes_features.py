"""`moving-scenes-features`, trained to name what happens in a clip, and its figures.

The loss is the cross entropy of the caption's facts (ground, hit, and of each colour shape,
direction, speed and event) and the squared error of where objects begin and end. Half of the clips
are mirrored and half of those without a hit played backwards, with their facts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mmaccel.demo.features import save_features
from mmaccel.demo.moving_scenes.data import VALIDATION_SEED, make_clips
from mmaccel.demo.moving_scenes.features import (
    EVENTS,
    ClipFeatures,
    draw_reference_clips,
    extract_clip_features,
    load_clip_features,
)
from mmaccel.demo.moving_scenes.layout import (
    COLOURS,
    DIRECTIONS,
    SHAPES,
    SPEEDS,
    MovingScene,
)
from mmaccel.demo.scenes.layout import BACKGROUNDS, CANVAS
from mmaccel.evaluation.quality.frechet import frechet_of
from scripts.training.feature_fit import FeatureFit, Measured, export_card, fit

FEATURES_SEED = 26  # of no other collection
NAME = "features"
_FACTS = ("directions", "speeds", "events")
_TURNED = {"left": "right", "right": "left"}
_BACKWARDS = {**_TURNED, "up": "down", "down": "up", "appears": "vanishes", "vanishes": "appears"}
_DRAWN = 64  # clips drawn together
_NOTE = (
    "The last 800 steps had one more head, of film grain, which is not kept. "
    "Noise: standard deviation in 0..1 of full range. A quarter, half: of the clips. Clips played "
    "backwards are nearly clips of the data (what moved left moves right, what appeared vanishes): "
    "a set of all directions is close to itself backwards, a set of one direction is far."
)
_DIRECTIONS, _SPEEDS = (*DIRECTIONS, ""), (*SPEEDS, "")


def train_clip_features(
    target: str | Path, work: str | Path, plan: FeatureFit, count: int = 2560
) -> None:
    """Trains, or goes on training, and writes `target/model.safetensors` (float16).

    Args:
        target: folder of the shipped weights; made where missing.
        work: folder of state and log; made where missing.
        plan: steps and batch.
        count: distinct clips.
    """
    torch.manual_seed(0)
    model = ClipFeatures()
    clips, wanted = draw_examples(FEATURES_SEED, count)

    def loss(step: int) -> Tensor:
        rng = np.random.default_rng((FEATURES_SEED, step))
        rows = torch.from_numpy(rng.integers(count, size=plan.batch))
        is_turned, is_reversed = torch.from_numpy(rng.random((2, plan.batch)) < 0.5)
        chosen = {name: answers[rows] for name, answers in wanted.items()}
        seen, right = mirror(clips[rows], chosen, is_turned)
        return measure_loss(model, *turn_back(seen, right, is_reversed))

    fit(model, plan, loss, Path(work), NAME)
    model.standardise(clips[:1000])
    save_features(model, Path(target))


def draw_examples(seed: int, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Clips `[count, 10, 3, 64, 64]` uint8 of a collection, and their `make_targets`."""
    drawn, targets = [], []
    for first in range(0, count, _DRAWN):
        scenes, _, clips = make_clips(seed, range(first, min(first + _DRAWN, count)))
        drawn.append(clips)
        targets.append(make_targets(scenes))
    return torch.cat(drawn), {k: torch.cat([t[k] for t in targets]) for k in targets[0]}


def measure_loss(model: ClipFeatures, clips: Tensor, wanted: dict[str, Tensor]) -> Tensor:
    """The sum of all heads' losses, a scalar; facts of an object count where it is.

    Args:
        model: to be trained.
        clips: `[B, 10, 3, 64, 64]` uint8.
        wanted: of `make_targets`.
    """
    said = model.read(model(clips))
    is_there = wanted["shapes"] < len(SHAPES)
    loss = cross_entropy(said["ground"], wanted["ground"])
    loss = loss + cross_entropy(said["hit"], wanted["hit"])
    loss = loss + 3 * cross_entropy(said["shapes"].flatten(0, 1), wanted["shapes"].flatten())
    for name in _FACTS:
        loss = loss + cross_entropy(said[name][is_there], wanted[name][is_there])
    return loss + 20 * (said["ways"] - wanted["ways"])[is_there].square().mean()


def make_targets(scenes: Sequence[MovingScene]) -> dict[str, Tensor]:
    """What the heads are to say of B clips, see `ClipFeatures.read`: numbers of the right answers,
    int64, and `ways`, float32. A colour without an object has the last answer of each, and 0.
    """
    n = len(COLOURS)
    found = {
        "shapes": torch.full((len(scenes), n), len(SHAPES)),
        "directions": torch.full((len(scenes), n), len(DIRECTIONS)),
        "speeds": torch.full((len(scenes), n), len(SPEEDS)),
        "events": torch.zeros(len(scenes), n, dtype=torch.int64),
    }
    ways = torch.zeros(len(scenes), n, 4)
    for b, scene in enumerate(scenes):
        for actor in scene.actors:
            c = COLOURS.index(actor.colour)
            found["shapes"][b, c] = SHAPES.index(actor.shape)
            found["directions"][b, c] = _DIRECTIONS.index(actor.direction)
            found["speeds"][b, c] = _SPEEDS.index(actor.speed)
            found["events"][b, c] = EVENTS.index(actor.event)
            ways[b, c] = torch.tensor([*actor.track[0], *actor.track[-1]]) / CANVAS - 0.5
    ground = torch.tensor([BACKGROUNDS.index(scene.background) for scene in scenes])
    hit = torch.tensor([int(scene.is_hit) for scene in scenes])
    return found | {"ways": ways, "ground": ground, "hit": hit}


def mirror(
    clips: Tensor, wanted: dict[str, Tensor], is_turned: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Left and right changed in some clips, and in what is said of them.

    Args:
        clips: `[B, F, 3, h, w]`.
        wanted: of `make_targets`.
        is_turned: `[B]` bool.
    """
    clips = torch.where(is_turned[:, None, None, None, None], clips.flip(-1), clips)
    is_turned = is_turned[:, None]
    directions = wanted["directions"]
    sign = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    return clips, wanted | {
        "directions": torch.where(
            is_turned, _renamed(_DIRECTIONS, _TURNED)[directions], directions
        ),
        "ways": torch.where(is_turned[..., None], wanted["ways"] * sign, wanted["ways"]),
    }


def turn_back(
    clips: Tensor, wanted: dict[str, Tensor], is_reversed: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The last frame first in some clips without a hit, and what is then said of them (arguments as
    `mirror`). A clip with a hit stays: its caption names the object that moves first.
    """
    is_reversed = is_reversed & (wanted["hit"] == 0)
    clips = torch.where(is_reversed[:, None, None, None, None], clips.flip(1), clips)
    is_reversed = is_reversed[:, None]
    directions, events = wanted["directions"], wanted["events"]
    return clips, wanted | {
        "directions": torch.where(
            is_reversed, _renamed(_DIRECTIONS, _BACKWARDS)[directions], directions
        ),
        "events": torch.where(is_reversed, _renamed(EVENTS, _BACKWARDS)[events], events),
        "ways": torch.where(is_reversed[..., None], wanted["ways"].roll(2, -1), wanted["ways"]),
    }


def _renamed(answers: Sequence[str], names: dict[str, str]) -> Tensor:
    """Of each answer the number of the one that it becomes."""
    return torch.tensor([answers.index(names.get(answer, answer)) for answer in answers])


def export_clip_features_card(
    work: str | Path, target: str | Path, plan: FeatureFit, count: int = 300
) -> dict[str, Any]:
    """Measures the network that ships and writes its card.

    Args:
        work: of the training.
        target: holds the weights.
        plan: of the training.
        count: clips of each figure.
    """
    measured = Measured(
        "moving-scenes-features",
        "runs/moving-scenes",
        count,
        measure_accuracy(count),
        count,
        measure_distances(count),
        (_NOTE,),
    )
    return export_card(
        measured, load_clip_features(), Path(work) / f"{NAME}.jsonl", plan.batch, Path(target)
    )


@torch.no_grad()
def measure_accuracy(count: int) -> dict[str, float]:
    """Shares of unseen clips, or of the objects in them, of which the heads are right."""
    scenes, _, clips = make_clips(VALIDATION_SEED, range(count))
    wanted = make_targets(scenes)
    said = load_clip_features().read(extract_clip_features(clips))
    is_there = wanted["shapes"] < len(SHAPES)
    named = {k: scores.argmax(-1) == wanted[k] for k, scores in said.items() if k != "ways"}
    seen = (said["shapes"].argmax(-1) < len(SHAPES)) == is_there
    found = {"ground": named["ground"], "colours": seen.all(1), "hit": named["hit"]}
    found |= {name: named[name][is_there] for name in ("shapes", *_FACTS)}
    return {name: round(float(right.float().mean()), 4) for name, right in found.items()}


def measure_distances(count: int) -> dict[str, float]:
    """Fréchet distances of damaged clips from as many whole ones, by damage."""
    first = extract_clip_features(draw_reference_clips(0, count)).numpy()
    found = {}
    others = draw_reference_clips(count, count)
    for name, damage in DAMAGES.items():
        features = extract_clip_features(damage(others)).numpy()
        found[name] = round(frechet_of(first, features).distance, 4)
    return found


def add_noise(clips: Tensor, strength: float) -> Tensor:
    """Normal noise of a standard deviation, in 0..1 of full range, on `[N, F, 3, h, w]` uint8."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        (clip.float() / 255 + strength * torch.randn(clip.shape, generator=generator)).clamp(0, 1)
        for clip in clips
    ]
    return (torch.stack(rows) * 255).round().to(torch.uint8)


def freeze(clips: Tensor, share: float) -> Tensor:
    """The first frame alone, in the first clips of `[N, F, 3, h, w]`; the others as they are."""
    n = round(share * len(clips))
    return torch.cat([clips[:n, :1].expand_as(clips[:n]), clips[n:]])


def reverse(clips: Tensor, share: float) -> Tensor:
    """The last frame first, in the first clips of `[N, F, 3, h, w]`."""
    n = round(share * len(clips))
    return torch.cat([clips[:n].flip(1), clips[n:]])


def shuffle(clips: Tensor, share: float) -> Tensor:
    """Frames in any order, in the first clips of `[N, F, 3, h, w]`."""
    n = round(share * len(clips))
    orders = np.random.default_rng(0).permuted(np.tile(np.arange(clips.shape[1]), (n, 1)), axis=1)
    rows = torch.arange(n)[:, None]
    return torch.cat([clips[:n][rows, torch.from_numpy(orders)], clips[n:]])


DAMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda c: c,
    "noise 0.02": lambda c: add_noise(c, 0.02),
    "noise 0.05": lambda c: add_noise(c, 0.05),
    "noise 0.1": lambda c: add_noise(c, 0.1),
    "noise 0.2": lambda c: add_noise(c, 0.2),
    "a quarter frozen": lambda c: freeze(c, 0.25),
    "half frozen": lambda c: freeze(c, 0.5),
    "all frozen": lambda c: freeze(c, 1.0),
    "a quarter shuffled": lambda c: shuffle(c, 0.25),
    "half shuffled": lambda c: shuffle(c, 0.5),
    "all shuffled": lambda c: shuffle(c, 1.0),
    "all backwards": lambda c: reverse(c, 1.0),
}
