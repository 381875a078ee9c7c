"""Codes of several scales against algorithms 1 and 2 written with matrices, and planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.errors import OptionError, ShapeError, UnsupportedModelError
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


def area(last: int, side: int) -> Tensor:
    """`[side, last]`: means of the pixels that a cell of the smaller grid touches."""
    rows = torch.zeros(side, last, dtype=torch.float64)
    for cell in range(side):
        low, high = cell * last // side, -(-(cell + 1) * last // side)
        rows[cell, low:high] = 1 / (high - low)
    return rows


def bicubic(side: int, last: int) -> Tensor:
    """`[last, side]`: R. Keys' kernel (1981) with a = -0.75, edges repeated."""
    rows = torch.zeros(last, side, dtype=torch.float64)
    for pixel in range(last):
        at = (pixel + 0.5) * side / last - 0.5
        for near in range(int(np.floor(at)) - 1, int(np.floor(at)) + 3):
            x = abs(at - near)
            weight = 1.25 * x**3 - 2.25 * x**2 + 1
            if x > 1:
                weight = -0.75 * (x**3 - 5 * x**2 + 8 * x - 4)
            rows[pixel, min(max(near, 0), side - 1)] += weight
    return rows


def ticks(n_scales: int) -> list[int]:
    """Of each scale the convolution, as the released code chooses it."""
    at = np.linspace(1 / 3 / 4, 1 - 1 / 3 / 4, 4)
    return [int(np.argmin(np.abs(at - k / (n_scales - 1)))) for k in range(n_scales)]


def grow(q: MultiScaleQuantizer, codes: Tensor, scale: int) -> Tensor:
    """What codes [n n] of one row add, [C, N, N]."""
    side, last = q.sides[scale], q.sides[-1]
    grid = q.embedding.weight[codes].T.unflatten(1, (side, side))
    up = bicubic(side, last)
    grown = up @ grid @ up.T if side < last else grid
    phi = q.phi[ticks(len(q.sides))[scale]]
    return grown / 2 + F.conv2d(grown[None], phi.weight, phi.bias, padding=1)[0] / 2


def algorithm_1(q: MultiScaleQuantizer, latents: Tensor) -> Tensor:
    """The codes [L] of latents [C, N, N]."""
    rest, codes = latents, []
    for scale, side in enumerate(q.sides):
        down = area(q.sides[-1], side)
        vectors = (down @ rest @ down.T).flatten(1).T
        codes.append(torch.cdist(vectors, q.embedding.weight).argmin(1))
        rest = rest - grow(q, codes[-1], scale)
    return torch.cat(codes)


def is_published(q: MultiScaleQuantizer) -> bool:
    """Whether codes and their sum are the algorithms', and so the next scale's inputs."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 4, 5, 5, generator=generator, dtype=torch.float64)
    codes = torch.stack([algorithm_1(q, each) for each in latents])
    lengths = [side * side for side in q.sides]
    parts = codes.split(lengths, 1)
    sums = [torch.stack([grow(q, row, k) for row in part]) for k, part in enumerate(parts)]
    down = area(5, 3)
    inputs = (down @ (sums[0] + sums[1]) @ down.T).flatten(2).mT
    return (
        q.encode(latents).equal(codes)
        and torch.allclose(q.decode(codes), torch.stack(sums).sum(0))
        and torch.allclose(q.shrink(sums[0] + sums[1], 2), inputs)
    )


def test_codes_and_sums_are_the_papers() -> None:
    assert is_published(make())


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


def swap(which: str) -> Callable[[Patch], None]:
    """Bicubic interpolation in place of means over areas, or the other way round."""

    def plant(patch: Patch) -> None:
        def other(x: Tensor, size: tuple[int, int], mode: str) -> Tensor:
            mode = {"area": "bicubic", "bicubic": "area"}[mode] if mode == which else mode
            return F.interpolate(x, size=size, mode=mode)

        patch.setattr(multi_scale, "interpolate", other)

    plant.__name__ = f"other_than_{which}"
    return plant


@pytest.mark.parametrize(
    "plant",
    [forget_what_is_left, take_the_next_convolution, swap("area"), swap("bicubic")],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_bug_is_rejected(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    assert not is_published(make())


@pytest.mark.parametrize("sides", [SIDES, PUBLISHED, tuple(range(1, 9))])
def test_each_scale_has_the_convolution_of_the_released_code(sides: tuple[int, ...]) -> None:
    q = make(sides)
    for scale, of_scale in enumerate(ticks(len(sides))):
        alone = make(sides)
        for number, phi in enumerate(alone.phi):
            if number != of_scale:
                phi.weight.zero_()
        codes = torch.arange(sides[scale] ** 2)[None] % 40
        assert alone.spread(codes, scale).equal(q.spread(codes, scale))


def test_guidance_grows_from_none_to_all() -> None:
    layout = Scales((1, 2, 3), 11)
    share = layout.guidance_share(torch.tensor([[0, 1, 4, 5, 13]]))
    assert layout.frame == 14 and share.tolist() == [[0, 0.5, 0.5, 1, 1]]
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
    (tmp_path / "tokenizer.json").write_text('{"class": "Other"}')
    with pytest.raises(OptionError, match="model: expected class 'MultiScaleTokenizer'"):
        load_multi_scale(tmp_path)
    save_multi_scale(MultiScaleTokenizer(config), tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"class": "MultiScaleTokenizer", "code_width": 5}')
    with pytest.raises(UnsupportedModelError, match="model: expected .* as .* asks, received"):
        load_multi_scale(tmp_path)
