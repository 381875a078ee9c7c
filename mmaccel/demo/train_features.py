"""Trains the features of `scenes`: cross entropy of what is in a picture, squared error of places.

Pictures are mirrored half of the time, with their places; nothing else is done to them, so that
noise and blur stay visible to the features.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from mmaccel.demo.scenes_data import make_scenes
from mmaccel.demo.scenes_features import SceneFeatures, make_targets
from mmaccel.demo.scenes_layout import SHAPES

FEATURES_SEED = 6  # of no other collection
_DRAWN = 500  # pictures drawn together


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
        count: distinct pictures.
        epochs: how often each is seen.
        batch: pictures a step.
        rate: largest step size of AdamW, one cycle.
    """
    target, work = Path(target), Path(work)
    for folder in (target, work):
        folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    began = time.time()
    pictures, wanted = draw_examples(FEATURES_SEED, count)
    model = SceneFeatures()
    optimiser = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    steps = count // batch * epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps, pct_start=0.1)
    with (work / "features.jsonl").open("w", encoding="utf-8") as log:
        for epoch in range(1, epochs + 1):
            total = 0.0
            order = torch.randperm(count)[: count // batch * batch]
            for rows in order.split(batch):
                seen, right = _mirror(pictures[rows], {k: v[rows] for k, v in wanted.items()})
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
    model.eval().standardise(pictures[:2000])
    small = {k: v.half() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    save_file({k: v.contiguous() for k, v in small.items()}, target / "model.safetensors")


def draw_examples(seed: int, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Pictures `[count, 3, 64, 64]` uint8 of a collection, and their `make_targets`."""
    drawn, targets = [], []
    for first in range(0, count, _DRAWN):
        scenes, _, pictures = make_scenes(seed, range(first, min(first + _DRAWN, count)))
        drawn.append(pictures)
        targets.append(make_targets(scenes))
    return torch.cat(drawn), {k: torch.cat([t[k] for t in targets]) for k in targets[0]}


def measure_loss(model: SceneFeatures, pictures: Tensor, wanted: dict[str, Tensor]) -> Tensor:
    """The sum of all heads' losses, a scalar; sizes and places count where an object is.

    Args:
        model: to be trained.
        pictures: `[B, 3, 64, 64]` uint8.
        wanted: of `make_targets`.
    """
    told = model.read(model(pictures))
    is_there = wanted["shapes"] < len(SHAPES)
    loss = cross_entropy(told["ground"], wanted["ground"])
    loss = loss + 3 * cross_entropy(told["shapes"].flatten(0, 1), wanted["shapes"].flatten())
    loss = loss + cross_entropy(told["sizes"][is_there], wanted["sizes"][is_there])
    return loss + 20 * (told["places"] - wanted["places"])[is_there].square().mean()


def _mirror(pictures: Tensor, wanted: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Left and right changed in half of a batch."""
    turned = torch.rand(len(pictures)) < 0.5
    pictures = torch.where(turned[:, None, None, None], pictures.flip(-1), pictures)
    places = wanted["places"].clone()
    places[turned, :, 0] *= -1
    return pictures, wanted | {"places": places}
