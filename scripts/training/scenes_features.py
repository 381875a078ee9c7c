"""`scenes-features`, trained to name what is in an image, and its figures.

The loss is the cross entropy of ground, shapes and sizes and the squared error of places. Images
are mirrored half of the time, with their places; nothing else is done to them, so that noise and
blur stay visible to the features.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy, pad

from mmaccel.catalog import load
from mmaccel.demo.features import save_features
from mmaccel.demo.scenes.data import VALIDATION_SEED, make_scenes
from mmaccel.demo.scenes.features import (
    SceneFeatures,
    draw_reference,
    extract_features,
    load_features,
)
from mmaccel.demo.scenes.layout import BACKGROUNDS, CANVAS, COLOURS, SHAPES, SIZES, Scene

FEATURES_SEED = 6  # of no other collection
_DRAWN = 500  # images drawn together


def train_features(
    target: str | Path,
    work: str | Path,
    count: int = 12_000,
    epochs: int = 14,
    batch: int = 64,
    rate: float = 3e-3,
) -> None:
    """Train and write `target/model.safetensors` (float16) and `work/features.jsonl`.

    Args:
        target: folder of the shipped weights; made where missing.
        work: folder of the log; made where missing.
        count: distinct images.
        epochs: how often each is seen.
        batch: images a step.
        rate: largest step size of AdamW, one cycle.
    """
    target, work = Path(target), Path(work)
    for folder in (target, work):
        folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    began = time.time()
    images, wanted = draw_examples(FEATURES_SEED, count)
    model = SceneFeatures()
    optimiser = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    steps = count // batch * epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps, pct_start=0.1)
    with (work / "features.jsonl").open("w", encoding="utf-8") as log:
        for epoch in range(1, epochs + 1):
            total = 0.0
            order = torch.randperm(count)[: count // batch * batch]
            for rows in order.split(batch):
                seen, right = _mirror(images[rows], {k: v[rows] for k, v in wanted.items()})
                loss = measure_loss(model, seen, right)
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
                schedule.step()
                total += loss.item()
            line = {"epoch": epoch, "loss": round(total / (count // batch), 4)}
            line |= {"pictures": count, "seconds": round(time.time() - began, 1)}
            log.write(json.dumps(line) + "\n")
            log.flush()
    model.eval().standardise(images[:2000])
    save_features(model, target)


def draw_examples(seed: int, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Images `[count, 3, 64, 64]` uint8 of a collection, and their `make_targets`."""
    drawn, targets = [], []
    for first in range(0, count, _DRAWN):
        scenes, _, images = make_scenes(seed, range(first, min(first + _DRAWN, count)))
        drawn.append(images)
        targets.append(make_targets(scenes))
    return torch.cat(drawn), {k: torch.cat([t[k] for t in targets]) for k in targets[0]}


def measure_loss(model: SceneFeatures, images: Tensor, wanted: dict[str, Tensor]) -> Tensor:
    """The sum of all heads' losses, a scalar; sizes and places count where an object is.

    Args:
        model: to be trained.
        images: `[B, 3, 64, 64]` uint8.
        wanted: of `make_targets`.
    """
    predicted = model.read(model(images))
    is_there = wanted["shapes"] < len(SHAPES)
    loss = cross_entropy(predicted["ground"], wanted["ground"])
    loss = loss + 3 * cross_entropy(predicted["shapes"].flatten(0, 1), wanted["shapes"].flatten())
    loss = loss + cross_entropy(predicted["sizes"][is_there], wanted["sizes"][is_there])
    return loss + 20 * (predicted["places"] - wanted["places"])[is_there].square().mean()


def _mirror(images: Tensor, wanted: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Left and right changed in half of a batch."""
    turned = torch.rand(len(images)) < 0.5
    images = torch.where(turned[:, None, None, None], images.flip(-1), images)
    places = wanted["places"].clone()
    places[turned, :, 0] *= -1
    return images, wanted | {"places": places}


@torch.no_grad()
def measure_accuracy(count: int) -> dict[str, float]:
    """Shares of unseen images, objects or pairs of objects of which the heads are right."""
    images, wanted = draw_examples(VALIDATION_SEED, count)
    predicted = load_features().read(extract_features(images))
    is_there = wanted["shapes"] < len(SHAPES)
    shapes = predicted["shapes"].argmax(-1)
    right = []
    for scene in range(count):
        for a, b in combinations(is_there[scene].nonzero()[:, 0].tolist(), 2):
            real, seen = (
                p[scene, a] - p[scene, b] for p in (wanted["places"], predicted["places"])
            )
            if float(real.abs().max()) > 5 / 64:  # one inside the other has no direction
                axis = int(real.abs().argmax())
                right.append(bool(seen[axis].sign() == real[axis].sign()))
    found = {
        "ground": (predicted["ground"].argmax(-1) == wanted["ground"]).float().mean(),
        "colours": ((shapes < len(SHAPES)) == is_there).all(1).float().mean(),
        "shapes": (shapes == wanted["shapes"])[is_there].float().mean(),
        "sizes": (predicted["sizes"].argmax(-1) == wanted["sizes"])[is_there].float().mean(),
        "directions": torch.tensor(right).float().mean(),
    }
    return {name: round(float(value), 4) for name, value in found.items()}


def measure_distances(count: int) -> dict[str, dict[str, float]]:
    """Fréchet and kernel distances of damaged images from as many whole ones, by damage."""
    frechet_of = load("mmaccel.evaluation.quality.frechet:frechet_of")
    squared_mmd = load("mmaccel.evaluation.quality.kid:squared_mmd")
    both = draw_reference(2 * count)
    reference = extract_features(both[:count]).numpy()
    found = {}
    for name, damage in DAMAGES.items():
        features = extract_features(damage(both[count:].float() / 255)).numpy()
        found[name] = {
            "frechet": round(frechet_of(reference, features).distance, 4),
            "kid": round(squared_mmd(reference, features), 6),
        }
    return found


def add_noise(images: Tensor, strength: float) -> Tensor:
    """Normal noise of a standard deviation, in 0..1 of full range, on `[N, 3, h, w]` in 0..1."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(images.shape, generator=generator)
    return (images + strength * noise).clamp(0, 1)


def blur(images: Tensor, side: int) -> Tensor:
    """Means over squares of an odd side, on `[N, 3, h, w]`."""
    margin = side // 2
    return avg_pool2d(pad(images, (margin,) * 4, mode="replicate"), side, 1)


DAMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda p: p,
    "noise 0.02": lambda p: add_noise(p, 0.02),
    "noise 0.05": lambda p: add_noise(p, 0.05),
    "noise 0.1": lambda p: add_noise(p, 0.1),
    "noise 0.2": lambda p: add_noise(p, 0.2),
    "blur 3": lambda p: blur(p, 3),
    "blur 5": lambda p: blur(p, 5),
    "blur 9": lambda p: blur(p, 9),
    "grey": lambda p: p.mean(1, keepdim=True).expand_as(p),
    "upside down": lambda p: p.flip(-2),
}


def make_targets(scenes: Sequence[Scene]) -> dict[str, Tensor]:
    """What the heads are to say of B scenes: `ground` `[B]`, `shapes` and `sizes` `[B, 7]` int64
    (size 0 where a colour is absent) and `places` `[B, 7, 2]` float32.
    """
    n = len(COLOURS)
    shapes = torch.full((len(scenes), n), len(SHAPES))
    sizes, places = torch.zeros(len(scenes), n, dtype=torch.long), torch.zeros(len(scenes), n, 2)
    for b, scene in enumerate(scenes):
        for thing in scene.objects:
            c = COLOURS.index(thing.colour)
            shapes[b, c] = SHAPES.index(thing.shape)
            sizes[b, c] = SIZES.index(thing.size)
            places[b, c] = torch.tensor([thing.x, thing.y]) / CANVAS - 0.5
    ground = torch.tensor([BACKGROUNDS.index(s.background) for s in scenes])
    return {"ground": ground, "shapes": shapes, "sizes": sizes, "places": places}
