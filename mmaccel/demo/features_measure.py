"""The figures of the card of `scenes-features`, each measured here and nowhere typed in."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from mmaccel.catalog import load
from mmaccel.demo.features_card import write_features_card
from mmaccel.demo.scenes_data import VALIDATION_SEED
from mmaccel.demo.scenes_export import this_machine
from mmaccel.demo.scenes_features import draw_reference, extract_features, load_features
from mmaccel.demo.scenes_layout import SHAPES
from mmaccel.demo.train_features import draw_examples


def export_features_card(work: str | Path, target: str | Path, count: int = 1000) -> dict[str, Any]:
    """Measure the exported network and write `card.json` and `README.md` beside it.

    Args:
        work: of `mmaccel.demo.train_features.train_features`; holds its log.
        target: holds the weights.
        count: pictures for each figure.

    Returns:
        The content of `card.json`.
    """
    work, target = Path(work), Path(target)
    lines = (work / "features.jsonl").read_text(encoding="utf-8").splitlines()
    last = json.loads(lines[-1])
    card: dict[str, Any] = {
        "name": "scenes-features",
        "command": "python scripts/train_demo.py features\npython scripts/train_demo.py "
        "features-card",
        "parameters": sum(p.numel() for p in load_features(target).parameters()),
        "pictures": count,
        "right": measure_accuracy(count),
        "distances": measure_distances(count),
        "training": {
            "pictures": last["pictures"],
            "epochs": last["epoch"],
            "minutes": round(last["seconds"] / 60, 1),
        },
        "measured_with": this_machine("cpu"),
    }
    (target / "card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    (target / "README.md").write_text(write_features_card(card), encoding="utf-8")
    return card


@torch.no_grad()
def measure_accuracy(count: int) -> dict[str, float]:
    """Shares of unseen pictures, objects or pairs of objects of which the heads are right."""
    pictures, wanted = draw_examples(VALIDATION_SEED, count)
    told = load_features().read(extract_features(pictures))
    is_there = wanted["shapes"] < len(SHAPES)
    shapes = told["shapes"].argmax(-1)
    right = []
    for scene in range(count):
        for a, b in combinations(is_there[scene].nonzero()[:, 0].tolist(), 2):
            real, seen = (p[scene, a] - p[scene, b] for p in (wanted["places"], told["places"]))
            if float(real.abs().max()) > 5 / 64:  # one inside the other has no direction
                axis = int(real.abs().argmax())
                right.append(bool(seen[axis].sign() == real[axis].sign()))
    found = {
        "ground": (told["ground"].argmax(-1) == wanted["ground"]).float().mean(),
        "colours": ((shapes < len(SHAPES)) == is_there).all(1).float().mean(),
        "shapes": (shapes == wanted["shapes"])[is_there].float().mean(),
        "sizes": (told["sizes"].argmax(-1) == wanted["sizes"])[is_there].float().mean(),
        "directions": torch.tensor(right).float().mean(),
    }
    return {name: round(float(value), 4) for name, value in found.items()}


def measure_distances(count: int) -> dict[str, dict[str, float]]:
    """Fréchet and kernel distances of damaged pictures from as many whole ones, by damage."""
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


def add_noise(pictures: Tensor, strength: float) -> Tensor:
    """Normal noise of a standard deviation, in 0..1 of full range, on `[N, 3, h, w]` in 0..1."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(pictures.shape, generator=generator)
    return (pictures + strength * noise).clamp(0, 1)


def blur(pictures: Tensor, side: int) -> Tensor:
    """Means over squares of an odd side, on `[N, 3, h, w]`."""
    reach = side // 2
    return avg_pool2d(pad(pictures, (reach,) * 4, mode="replicate"), side, 1)


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
