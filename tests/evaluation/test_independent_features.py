"""The permutation test of images: two samples that share no seed, caption by caption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import Autoregressive, Jacobi, TextToImage
from mmaccel.evaluation.exactness import report as exactness_report
from mmaccel.evaluation.exactness.identity import Check
from mmaccel.evaluation.exactness.report import Plan, check_all
from tests.fixtures.tiny_model import CAPTIONS

SEED, ASKED = 7, [CAPTIONS[k % 3] for k in range(5)]


@pytest.fixture(scope="module")
def pipe(tiny_folder: Path) -> TextToImage:
    return TextToImage.from_pretrained(tiny_folder)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_policy_s_images_are_of_seeds_that_nothing_else_has(
    pipe: TextToImage, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    """With the same seeds a bitwise policy would be held against copies of its own images."""
    runs: list[tuple[Any, list[str], set[int]]] = []
    stream, shown, told = TextToImage.stream, [], []

    def look(self: TextToImage, captions: Any, *args: Any, **options: Any) -> Any:
        runs.append((options["policy"], list(captions), set(options["seed"])))
        return stream(self, captions, *args, **options)

    def extract(pixels: Tensor) -> Tensor:
        shown.extend(pixels)
        return pixels.flatten(1).double()

    def check(policy: Any, first: Any, second: Any, captions: Any) -> Check:
        told.append((policy, first, second, list(captions)))
        return Check("features of images", True, True, "", {})

    monkeypatch.setattr(TextToImage, "stream", look)
    monkeypatch.setattr(exactness_report, "check_features", check)
    plain, policy = Autoregressive(), Jacobi(5)
    params = pipe.image_model.params
    check_all(Plan(pipe, policy, plain, ASKED, SEED, params, batch_size, "float32", 0, extract))
    *before, (last, captions, seeds) = runs
    assert last is policy and captions == ASKED and len(seeds) == 5
    assert before and all(seeds.isdisjoint(others) for _, _, others in before)

    monkeypatch.undo()
    wanted = [
        torch.from_numpy(_pixels(pipe, plain, range(SEED, SEED + 5))),
        torch.from_numpy(_pixels(pipe, policy, sorted(seeds))),
    ]
    assert torch.equal(torch.stack(shown), torch.cat(wanted))
    ((tested, first, second, with_captions),) = told
    assert tested is policy and with_captions == ASKED
    for found, pixels in zip((first, second), wanted, strict=True):
        assert torch.equal(torch.from_numpy(found), pixels.flatten(1).double())
    assert not any((a == b).all() for a in first for b in second)


def _pixels(pipe: TextToImage, policy: Any, seeds: Any) -> Any:
    """Images of the captions, `[N, 3, H, W]` uint8."""
    import numpy as np

    made = pipe(ASKED, policy=policy, seed=list(seeds))
    return np.stack([np.asarray(image).transpose(2, 0, 1) for image in made.images])
