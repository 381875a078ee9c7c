"""Features of scenes: what the heads are told and say, and that damage is seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmaccel.demo.features_measure import DAMAGES, measure_accuracy
from mmaccel.demo.scenes_features import (
    SceneFeatures,
    draw_reference,
    extract_features,
    load_features,
    make_targets,
)
from mmaccel.demo.scenes_layout import Scene, SceneObject
from mmaccel.demo.train_features import _mirror, measure_loss, train_features
from mmaccel.errors import ShapeError
from mmaccel.evaluation.quality.frechet import frechet_of
from mmaccel.evaluation.quality.kid import squared_mmd


def thing(colour: str, shape: str, size: str, x: float, y: float) -> SceneObject:
    return SceneObject(colour, shape, size, x, y, 8.0, 0.0, "plain", 0.0)


def test_targets_by_hand() -> None:
    pair = (thing("green", "star", "large", 16, 48), thing("white", "circle", "small", 64, 0))
    scene = Scene(pair, ("above",), "water", 0.0, 1.0, 0.0, 0.0, 0.01)
    told = make_targets([scene])
    assert told["ground"].tolist() == [2]
    assert told["shapes"].tolist() == [[5, 3, 5, 5, 5, 5, 0]]  # 5: no object of this colour
    assert told["sizes"][0, 1] == 1 and told["sizes"][0, 6] == 0
    assert told["places"][0, 1].tolist() == [-0.25, 0.25]
    assert told["places"][0, 6].tolist() == [0.5, -0.5]
    torch.manual_seed(0)
    pictures = torch.arange(8).expand(20, 3, 8, 8).to(torch.uint8)
    turned, right = _mirror(pictures, {"places": torch.full((20, 7, 2), 0.25)})
    is_turned = turned[:, 0, 0, 0] == 7
    assert 0 < int(is_turned.sum()) < 20
    assert torch.equal(right["places"][:, 0, 0], torch.where(is_turned, -0.25, 0.25))
    assert (right["places"][..., 1] == 0.25).all()


def test_the_shipped_network_reads_unseen_pictures() -> None:
    right = measure_accuracy(60)
    assert right["ground"] > 0.97 and right["sizes"] > 0.95 and right["directions"] > 0.95
    assert right["colours"] > 0.85 and right["shapes"] > 0.5  # a guess would be right in 0.2


def test_damage_is_seen() -> None:
    """Distances from 150 whole pictures, of 150 others, rise with noise and with blur. Weak
    damage (a blur of 3 pixels) takes more pictures to be seen; the card has 1000."""
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


def test_features_are_standard_and_of_bytes_as_of_floats() -> None:
    drawn = draw_reference(200)
    features = extract_features(drawn)
    assert features.shape == (200, 64) and features.dtype == torch.float32
    assert features.mean(0).abs().max() < 0.6 and 0.5 < float(features.std(0).mean()) < 1.5
    assert torch.allclose(features, extract_features(drawn.float() / 255), atol=1e-5)
    alone = extract_features(drawn[7:8])
    assert torch.allclose(features[7:8], alone, atol=1e-4)
    with pytest.raises(ShapeError, match=r"expected \[B, 3, 64, 64\], received \[1, 3, 32, 32\]"):
        load_features()(torch.zeros(1, 3, 32, 32))


def test_standardising_does_not_change_what_is_read() -> None:
    torch.manual_seed(0)
    model, drawn = SceneFeatures().eval(), draw_reference(40)
    before = model.read(model(drawn))
    model.standardise(drawn)
    features = model(drawn)
    assert torch.allclose(features.mean(0), torch.zeros(64), atol=1e-4)
    assert torch.allclose(features.std(0), torch.ones(64), atol=1e-4)
    for name, told in model.read(features).items():
        assert torch.allclose(told, before[name], atol=1e-4)


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
