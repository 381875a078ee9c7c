"""Training of the small feature networks: it learns, goes on where it stopped, and is written."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from mmaccel.demo.moving_scenes.features import load_clip_features
from mmaccel.demo.voices.features import load_speech_features
from mmaccel.demo.voices.words import SPEAKERS, make_sentence
from scripts.training.feature_fit import FeatureFit
from scripts.training.moving_scenes_features import train_clip_features
from scripts.training.voices_features import train_speech_features


def read_losses(work: Path) -> list[float]:
    lines = (work / "features.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_clip_features_learn_and_are_written(tmp_path: Path) -> None:
    for steps in (1, 25):  # the second goes on
        train_clip_features(tmp_path / "out", tmp_path / "work", FeatureFit(steps, 8), count=16)
    first, last = read_losses(tmp_path / "work")
    assert last < first
    model = load_clip_features(tmp_path / "out")
    assert torch.load(tmp_path / "work" / "features.pt")["step"] == 25
    assert model(torch.zeros(2, 10, 3, 64, 64)).isfinite().all()


def test_speech_features_learn_and_are_written(tmp_path: Path) -> None:
    sentences = [list(make_sentence(3, k)) for k in range(6)]
    words = {word for sentence in sentences for word in sentence}
    (tmp_path / "lexicon.json").write_text(json.dumps({w: list(w[:3]) for w in words}))
    torch.manual_seed(0)
    sound = (torch.randn(6 * 12_000) * 2000).short().numpy()
    sound.tofile(tmp_path / "train.sound")
    found = {
        "ends": [12_000 * (k + 1) for k in range(6)],
        "sentences": sentences,
        "speakers": [k % len(SPEAKERS) for k in range(6)],
    }
    (tmp_path / "train.json").write_text(json.dumps(found))
    for steps in (1, 15):
        train_speech_features(tmp_path / "out", tmp_path, FeatureFit(steps, 4))
    first, last = read_losses(tmp_path)
    assert last < first
    features = load_speech_features(tmp_path / "out")(torch.randn(3, 10_240))
    assert features.shape == (3, 64) and features.isfinite().all()
