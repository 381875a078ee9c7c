"""Codes of several scales against algorithms 1 and 2 and planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.errors import ShapeError
from mmaccel.tokenizers_vq import multi_scale
from mmaccel.tokenizers_vq.multi_scale import (
    MultiScaleConfig,
    MultiScaleQuantizer,
    MultiScaleTokenizer,
    Scales,
    load_multi_scale,
    save_multi_scale,
)

Patch = pytest.MonkeyPatch
SIDES = (1, 2, 3, 5)
PUBLISHED = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)


def make(sides: tuple[int, ...] = SIDES) -> MultiScaleQuantizer:
    torch.manual_seed(3)
    made = MultiScaleQuantizer(sides, 40, 4).double()
    return made.requires_grad_(False)


def ticks(n_scales: int) -> list[int]:
    """Of each scale the convolution, as the released code chooses it."""
    at = np.linspace(1 / 3 / 4, 1 - 1 / 3 / 4, 4)
    return [int(np.argmin(np.abs(at - k / (n_scales - 1)))) for k in range(n_scales)]


def grow(q: MultiScaleQuantizer, codes: Tensor, scale: int) -> Tensor:
    """What codes [B, n n] add, [B, C, N, N]."""
    side, last = q.sides[scale], q.sides[-1]
    grown = q.embedding.weight[codes].mT.unflatten(2, (side, side))
    if side < last:
        grown = F.interpolate(grown, (last, last), mode="bicubic")
    phi = q.phi[ticks(len(q.sides))[scale]]
    return grown / 2 + F.conv2d(grown, phi.weight, phi.bias, padding=1) / 2


def is_published(sides: tuple[int, ...] = SIDES) -> bool:
    """Whether codes and their sum are the algorithms', and so the next scale's inputs."""
    q, last = make(sides), sides[-1]
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 4, last, last, generator=generator, dtype=torch.float64)
    total, parts, inputs = torch.zeros_like(latents), [], []
    for scale, side in enumerate(sides):
        inputs.append(F.adaptive_avg_pool2d(total, side).flatten(2).mT)
        small = F.adaptive_avg_pool2d(latents - total, side).flatten(2).mT
        parts.append(torch.cdist(small, q.embedding.weight).argmin(-1))
        total = total + grow(q, parts[-1], scale)
    codes, before = torch.cat(parts, 1), torch.zeros_like(latents)
    for scale, part in enumerate(parts):
        if not torch.allclose(q.shrink(before, scale), inputs[scale]):
            return False
        before = before + q.spread(part, scale)
    return q.encode(latents).equal(codes) and torch.allclose(q.decode(codes), total)


@pytest.mark.parametrize("sides", [SIDES, PUBLISHED, tuple(range(1, 9))])
def test_codes_and_sums_are_the_papers(sides: tuple[int, ...]) -> None:
    """Of ten scales, two are as near to one convolution as to another."""
    assert is_published(sides)


def forget_what_is_left(patch: Patch) -> None:
    """Every scale reads the latents anew."""
    read, first = MultiScaleQuantizer.read, {}

    def again(self: MultiScaleQuantizer, rest: Tensor, scale: int) -> Tensor:
        first.setdefault("rest", rest)
        return read(self, first["rest"], scale)

    patch.setattr(MultiScaleQuantizer, "read", again)


def take_the_next_convolution(patch: Patch) -> None:
    spread = MultiScaleQuantizer.spread_vectors

    def wrong(self: MultiScaleQuantizer, vectors: Tensor, scale: int) -> Tensor:
        patch.setattr(self, "_phi_of", [(k + 1) % 4 for k in ticks(len(self.sides))])
        return spread(self, vectors, scale)

    patch.setattr(MultiScaleQuantizer, "spread_vectors", wrong)


def swap_interpolations(patch: Patch) -> None:
    """Bicubic interpolation in place of means over areas, and the other way round."""
    others = {"area": "bicubic", "bicubic": "area"}
    patch.setattr(
        multi_scale, "interpolate", lambda x, size, mode: F.interpolate(x, size, mode=others[mode])
    )


@pytest.mark.parametrize(
    "plant",
    [forget_what_is_left, take_the_next_convolution, swap_interpolations],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_bug_is_rejected(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    assert not is_published()


def test_a_single_scale_is_not_guided() -> None:
    assert Scales((4,), 11).guidance_share(torch.tensor([[0, 15]])).tolist() == [[0, 0]]


def test_a_folder_holds_a_tokenizer(tmp_path: Path) -> None:
    config = MultiScaleConfig(
        12, 8, 1, 8, 1, 8, 1, patch=4, sides=(1, 2, 3), n_codes=11, code_width=4
    )
    torch.manual_seed(0)
    made = MultiScaleTokenizer(config).eval()
    save_multi_scale(made, tmp_path)
    loaded = load_multi_scale(tmp_path)
    images = torch.rand(2, 3, 12, 12)
    tokens = loaded.encode(images)
    assert loaded.config == config and loaded.grid == (3, 3) and tokens.shape == (2, 14)
    near = made.half().float()  # as it is stored
    assert near.encode(images).equal(tokens)
    pixels = loaded.decode(tokens)
    assert pixels.equal(near.decode(tokens)) and pixels.shape == (2, 3, 12, 12)
    assert 0 <= float(pixels.min()) <= float(pixels.max()) <= 1
    with pytest.raises(ShapeError, match=r"tokens: expected \[B, 14\], received \[2, 13\]"):
        loaded.decode(tokens[:, 1:])
