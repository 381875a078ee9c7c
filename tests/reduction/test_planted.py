"""Planted structure: attention, tiles, changes in a video."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import mmaccel
from tests.reduction.methods import CASES
from tests.reduction.samples import Sample, batch, image, tiled, video

# method: (layer, queries) it must read, with a tower of DEPTH layers
READS = {
    "VisionZip": (-2, "cls"),
    "VisionZip without class token": (-2, "all"),
    "HiRED": (-2, "cls"),
    "FiCoCoV": (6, "cls"),
    "FiCoCoL": (6, "text"),
    "FastV": (1, "last"),
    "PyramidDrop": (5, "last"),
    "LazyLLM": (5, "last"),
}


def plant(sample: Sample, where: Tensor, layer: int, queries: str) -> Sample:
    """Attention on `where` in one layer by one kind of query; all others look elsewhere."""
    elsewhere = torch.ones(sample.n, dtype=torch.bool)
    elsewhere[where] = False
    mass = {}
    for name, noise in sample.mass.items():
        mass[name] = noise * 0.01 + elsewhere
        if name == queries:
            mass[name][layer] = noise[layer] * 0.01 + ~elsewhere
    return replace(sample, mass=mass)


@pytest.mark.parametrize("name", READS)
def test_planted_attention_is_found(name: str) -> None:
    check_attention(name)


def check_attention(name: str) -> None:
    """What the right layer and query attend to stays, in rows of unequal lengths."""
    case, kept = CASES[name], 24
    rows, planted = [], []
    for sample in case.rows():
        where = torch.randperm(sample.n, generator=torch.Generator().manual_seed(sample.n))[:kept]
        if case.kind == "tiles":  # all in the overview
            where = where % int((sample.group == 0).sum())
        planted.append(set(where.tolist()))
        rows.append(plant(sample, where, *READS[name]))
    options = {"HiRED": {"alpha": 1.0}, "FiCoCoV": {"attended": 1.0}, "FiCoCoL": {"attended": 1.0}}
    method = case.make(n_keep=30, **options.get(name, {}))
    plan = method.plan(case.context(rows))
    for row, expected in enumerate(planted):
        assert expected <= set(plan.keep[row].tolist())


def test_ilre_recalls_with_neighbours() -> None:
    where = torch.tensor([20, 60, 100])
    sample = plant(image(9, 14, 1), where, 2, "text")
    wide = {int(i) + d for i in where for d in (-1, 0, 1)}
    context = batch([sample], layer=3)
    assert wide <= set(mmaccel.ILRe(n_keep=24).plan(context).keep[0].tolist())
    alone = mmaccel.ILRe(n_keep=24, kernels=(1,)).plan(context).keep[0].tolist()
    assert {20, 60, 100} <= set(alone) and not wide <= set(alone)


BUDGET = 42  # of 7 groups of 24 tokens: the overview, and 2 x 3 tiles of 4 x 6
# places of the overview that the class token looks at -> tokens of each group that stay. The
# overview has 24 - that many of 24 parts of the budget, at most its 24 tokens.
TILES = {
    "upper left": ([(0, 0), (0, 1), (1, 0), (1, 1)], [24, 18, 0, 0, 0, 0, 0]),
    "right": ([(row, column) for row in range(4) for column in (4, 5)], [24, 0, 0, 9, 0, 0, 9]),
    "an L": (
        [(row, 5) for row in range(4)] + [(row, column) for row in (2, 3) for column in range(4)],
        [21, 0, 0, 4, 7, 7, 3],
    ),
}


@pytest.mark.parametrize("tile", [(4, 6), (6, 9)])  # as many tokens as the overview has, and more
@pytest.mark.parametrize("name", TILES)
def test_tiles_share_the_budget(name: str, tile: tuple[int, int]) -> None:
    """HiRED's accounting, by hand."""
    looked_at, shares = TILES[name]
    sample = tiled(4, 6, (2, 3), 1, tile)
    mass = sample.mass["cls"].clone()
    mass[0] = 0
    mass[0, :, [row * 6 + column for row, column in looked_at]] = 1
    sample = replace(sample, mass={**sample.mass, "cls": mass})
    method = mmaccel.HiRED(n_keep=BUDGET, alpha=1 - len(looked_at) / 24)
    plan = method.plan(batch([sample, sample]))
    assert torch.bincount(sample.group[plan.keep[0]], minlength=7).tolist() == shares
    assert plan.counts.tolist() == [BUDGET, BUDGET]
    late = mass[-2].sum(0)
    for group, share in enumerate(shares):  # the best of every tile
        own = (sample.group == group).nonzero()[:, 0]
        best = own[late[own].argsort(descending=True)[:share]]
        assert set(best.tolist()) <= set(plan.keep[0].tolist())


def moving(seed: int, changed: dict[int, list[int]]) -> Sample:
    """A video of 6 frames of 4 x 5 tokens that stands still but for some places of some frames."""
    still = video(6, 4, 5, seed)
    random = torch.Generator().manual_seed(seed)
    x = still.x[:20].repeat(6, 1)
    for frame, places in changed.items():
        for place in places:  # stays changed from this frame on
            x.view(6, 20, -1)[frame:, place] = torch.randn(16, generator=random)
    return replace(still, x=x + 0.001 * torch.randn(x.shape, generator=random))


CHANGES = {1: [3], 2: [0, 7, 19], 4: [11, 12], 5: [5]}


def test_evs_keeps_the_first_frame_and_what_changed() -> None:
    """Exactly the changed places stay, in the frame in which they change."""
    expected = [*range(20), *(20 * f + p for f, places in CHANGES.items() for p in places)]
    rows = [moving(1, CHANGES), moving(2, CHANGES)]
    plan = mmaccel.EVS(n_keep=len(expected)).plan(batch(rows, after=3))
    assert plan.keep.tolist() == [expected, expected]
    plan = mmaccel.EVS(keep=0.9, least_change=0.1).plan(batch(rows, before=2))
    assert (plan.keep - 2).tolist() == [expected, expected]
    assert mmaccel.EVS(keep=0.01).plan(batch(rows)).keep.tolist() == [[*range(20)]] * 2


def test_vidcom2_gives_more_to_the_frame_that_stands_out() -> None:
    """A frame unlike the others has the largest share; unlike tokens of still frames stay."""
    x = video(6, 4, 5, 3).x
    base = torch.ones(120, 16) + 0.02 * x
    strange = torch.tensor([7, 33, 98])
    base[strange] = -x[strange] * 3  # one token of frames 0, 1 and 4
    base[60:80] = -torch.ones(16) + 0.3 * x[60:80]  # frame 3
    sample = replace(video(6, 4, 5, 3), x=base)
    method = mmaccel.VidCom2(keep=0.25)
    context = batch([sample])
    shares = method.shares(context, torch.tensor([30]))[0].tolist()
    assert sum(shares) == 30 and shares[3] == max(shares) and shares[3] >= 2 * min(shares) - 1
    plan = method.plan(context)
    assert set(strange.tolist()) <= set(plan.keep[0].tolist()) and plan.counts[0] == 30
