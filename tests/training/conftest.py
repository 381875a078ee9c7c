"""A work folder of training: tiny models, a tiny tokenizer, tiny random pools."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mmaccel.tokenizers_vq.autoencoder import ImageTokenizer, save_tokenizer
from scripts.training import grammar_masked, scenes

SMALL = {
    "size": 64, "levels": [5, 3], "encoder_width": 8, "encoder_depth": 0, "decoder_width": 8,
    "decoder_depth": 0, "fine_width": 8, "fine_depth": 0,
}  # fmt: skip


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work folder with a random tokenizer and random pools; all generators are made tiny."""
    for module in (scenes, grammar_masked):
        for name, size in (("WIDTH", 16), ("INNER", 16), ("DEPTH", 1)):
            monkeypatch.setattr(module, name, size)
    torch.manual_seed(0)
    save_tokenizer(ImageTokenizer(**SMALL), SMALL, tmp_path / "tokenizer")
    rng = np.random.default_rng(0)
    for name, count in (("train", 12), ("validation", 500)):
        captions = ["a red circle", "a small blue star at night"] * (count // 2)
        (tmp_path / f"{name}.captions.json").write_text(json.dumps(captions))
        np.save(tmp_path / f"{name}.npy", np.zeros((count, 3, 64, 64), np.uint8))
        tokens = rng.integers(0, 15, (count, 256)).astype(np.int16)
        np.save(tmp_path / f"{name}.tokens.npy", tokens)
    return tmp_path
