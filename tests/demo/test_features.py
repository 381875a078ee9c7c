"""Features of scenes: targets and predictions of the heads."""

from __future__ import annotations

import torch

from mmaccel.demo.scenes.features import (
    SceneFeatures,
    draw_reference,
    extract_features,
)
from mmaccel.demo.scenes.layout import Scene, SceneObject
from scripts.training.scenes_features import make_targets


def thing(colour: str, shape: str, size: str, x: float, y: float) -> SceneObject:
    return SceneObject(colour, shape, size, x, y, 8.0, 0.0, "plain", 0.0)


def test_targets_by_hand() -> None:
    pair = (thing("green", "star", "large", 16, 48), thing("white", "circle", "small", 64, 0))
    scene = Scene(pair, ("above",), "water", 0.0, 1.0, 0.0, 0.0, 0.01)
    targets = make_targets([scene])
    assert targets["ground"].tolist() == [2]
    assert targets["shapes"].tolist() == [[5, 3, 5, 5, 5, 5, 0]]  # 5: no object of this colour
    assert targets["sizes"][0, 1] == 1 and targets["sizes"][0, 6] == 0
    assert targets["places"][0, 1].tolist() == [-0.25, 0.25]
    assert targets["places"][0, 6].tolist() == [0.5, -0.5]


def test_features_are_standard_and_of_bytes_as_of_floats() -> None:
    drawn = draw_reference(200)
    features = extract_features(drawn)
    assert features.shape == (200, 64) and features.dtype == torch.float32
    assert features.mean(0).abs().max() < 0.6 and 0.5 < float(features.std(0).mean()) < 1.5
    assert torch.allclose(features, extract_features(drawn.float() / 255), atol=1e-5)
    alone = extract_features(drawn[7:8])
    assert torch.allclose(features[7:8], alone, atol=1e-4)


def test_standardising_does_not_change_what_is_read() -> None:
    torch.manual_seed(0)
    model, drawn = SceneFeatures().eval(), draw_reference(40)
    before = model.read(model(drawn))
    model.standardise(drawn)
    features = model(drawn)
    assert torch.allclose(features.mean(0), torch.zeros(64), atol=1e-4)
    assert torch.allclose(features.std(0), torch.ones(64), atol=1e-4)
    for name, predicted in model.read(features).items():
        assert torch.allclose(predicted, before[name], atol=1e-4)
