"""The features of scenes in training: mirrored images, what is read, and that damage is seen."""

from __future__ import annotations

import numpy as np
import torch

from mmaccel.demo.scenes.features import (
    draw_reference,
    extract_features,
    load_features,
)
from mmaccel.demo.scenes.layout import Scene
from mmaccel.evaluation.quality.frechet import frechet_of
from mmaccel.evaluation.quality.kid import squared_mmd
from scripts.training.scenes_features import (
    DAMAGES,
    _mirror,
    make_targets,
    measure_accuracy,
    measure_loss,
    train_features,
)


def test_images_are_mirrored_with_their_places() -> None:
    torch.manual_seed(0)
    images = torch.arange(8).expand(20, 3, 8, 8).to(torch.uint8)
    turned, right = _mirror(images, {"places": torch.full((20, 7, 2), 0.25)})
    is_turned = turned[:, 0, 0, 0] == 7
    assert 0 < int(is_turned.sum()) < 20
    assert torch.equal(right["places"][:, 0, 0], torch.where(is_turned, -0.25, 0.25))
    assert (right["places"][..., 1] == 0.25).all()


def test_the_shipped_network_reads_unseen_images() -> None:
    right = measure_accuracy(60)
    assert right["ground"] > 0.97 and right["sizes"] > 0.95 and right["directions"] > 0.95
    assert right["colours"] > 0.85 and right["shapes"] > 0.5  # a guess would be right in 0.2


def test_damage_is_seen() -> None:
    """Distances from 150 whole images, of 150 others, rise with noise and with blur. Weak
    damage (a blur of 3 pixels) takes more images to be seen; the card has 1000."""
    drawn = draw_reference(300)
    reference = extract_features(drawn[:150]).numpy()
    others = drawn[150:].float() / 255
    damaged = {n: extract_features(damage(others)).numpy() for n, damage in DAMAGES.items()}
    kid = {name: squared_mmd(reference, features) for name, features in damaged.items()}
    assert kid["none"] < kid["noise 0.05"] < kid["noise 0.1"] < kid["noise 0.2"]
    assert kid["none"] + 0.05 < kid["blur 5"] < kid["blur 9"] < kid["grey"]
    frechet = {name: frechet_of(reference, features).distance for name, features in damaged.items()}
    assert 1.5 * frechet["none"] < frechet["noise 0.1"] < frechet["noise 0.2"]
    assert 1.3 * frechet["none"] < frechet["blur 5"] < frechet["blur 9"] < frechet["grey"]


def test_training_learns_and_writes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    train_features(tmp_path / "out", tmp_path / "work", count=64, epochs=6, batch=16)
    lines = (tmp_path / "work" / "features.jsonl").read_text().splitlines()
    losses = [float(line.split('"loss": ')[1].split(",")[0]) for line in lines]
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0]
    made = load_features(tmp_path / "out")
    assert np.isfinite(extract_features(draw_reference(2)).numpy()).all()
    wanted = make_targets([Scene((), (), "sand", 0.0, 1.0, 0.0, 0.0, 0.01)])
    there = {**wanted, "shapes": torch.zeros_like(wanted["shapes"])}
    assert measure_loss(made, draw_reference(1), there).isfinite()
