"""Pipelines can be pickled after they were used, and make the same tokens then.

All families but Orpheus, whose codec (snac) has parametrized modules, which torch does not pickle.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from tests.fixtures.checkpoints import FAMILIES, SIZES, captions
from tests.fixtures.media import MediaCase, build_media, content, open_media
from tests.fixtures.tiny_model import CAPTIONS, masked_beside_plain


def _is_same(pipe: Any, call: Callable[[Any], torch.Tensor]) -> bool:
    """Whether a used pipeline, and what its pickle is loaded to, go on with the same tokens."""
    wanted = call(pipe)
    loaded = call(pickle.loads(pickle.dumps(pipe)))
    return torch.equal(loaded, wanted) and torch.equal(call(pipe), wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_image_families(family: str, built: Callable[[str], Path]) -> None:
    pipe = mmaccel.TextToImage.from_pretrained(built(family), size=SIZES.get(family))
    assert _is_same(pipe, lambda pipe: pipe(captions(family)[0], seed=0).tokens)


def test_a_masked_model(tmp_path: Path) -> None:
    folder, _ = masked_beside_plain(tmp_path)
    pipe = mmaccel.TextToImage.from_pretrained(folder)
    policy = mmaccel.Stepwise(cache="prefix")
    assert _is_same(pipe, lambda pipe: pipe(CAPTIONS, policy=policy, seed=0).tokens)


@pytest.mark.parametrize("kind", ["llasa", "cosmos"])
def test_speech_and_video(kind: str, tmp_path: Path) -> None:
    folders = build_media(kind, tmp_path)
    pipe = open_media(kind, folders)
    assert _is_same(pipe, lambda pipe: content(MediaCase(kind, folders, pipe).call(seed=[0])[0]))
