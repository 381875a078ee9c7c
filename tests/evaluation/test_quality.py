"""Distances and intervals: by hand, against torchmetrics and scipy."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from mmaccel.evaluation.quality import report
from mmaccel.evaluation.quality.distances import (
    frechet_distance,
    frechet_floor,
    measure_distances,
    measure_kid,
    squared_mmd,
)
from mmaccel.evaluation.shares import wilson


def test_distances_by_hand() -> None:
    first = [[0.0], [2.0]]  # mean 1, variance 2
    second = [[0.0], [0.0], [6.0]]  # mean 2, variance 12
    found = measure_distances(first, second)["frechet"]
    assert found["distance"] == pytest.approx(1 + 2 + 12 - 2 * np.sqrt(24), rel=1e-12)
    assert (found["n_first"], found["n_second"], found["width"]) == (2, 3, 1)
    # (x y / 2 + 1)^3; own pairs: 1; 1, 1, 8 of three; across: 1 x 3, then 8, 27, 8
    first, second = [[0.0, 0.0], [2.0, 0.0]], [[1.0, 0.0], [2.0, 0.0], [1.0, 0.0]]
    own = (2.0**3 + 1.5**3 + 2.0**3) / 3
    across = 2 * (3 * 1 + 2.0**3 + 3.0**3 + 2.0**3) / 6
    assert squared_mmd(first, second) == pytest.approx(1 + own - across, rel=1e-12)


def test_fewer_items_than_features() -> None:
    """The trace of the root again, from the items themselves: no covariance, no root."""
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(8, 40)), 3 * rng.normal(size=(12, 40)) + 1
    one, other = (x - x.mean(0) for x in (a, b))
    shared = np.linalg.svd(one @ other.T, compute_uv=False).sum() / np.sqrt(7 * 11)
    traces = (one**2).sum() / 7 + (other**2).sum() / 11
    wanted = ((a.mean(0) - b.mean(0)) ** 2).sum() + traces - 2 * shared
    assert frechet_distance(a, b) == pytest.approx(wanted, rel=1e-12)
    assert frechet_distance(a + 1e6, b + 1e6) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 6])
def test_the_floor_is_the_mean_over_all_splits(n: int) -> None:
    items = np.array([0.0, 1.0, 1.5, 4.0, 4.5, 7.0, 11.0, 12.0])
    every = []
    for chosen in combinations(range(8), n):
        one, rest = items[list(chosen)], np.delete(items, chosen)
        apart = one.mean() - rest.mean()
        every.append(apart**2 + (one.std(ddof=1) - rest.std(ddof=1)) ** 2)
    found = frechet_floor(items[:n, None], items[n:, None], splits=4000)
    assert found == pytest.approx(np.mean(every), abs=5 * np.std(every) / 4000**0.5)


@pytest.mark.slow
def test_more_items_than_a_block_holds() -> None:
    """The sums of all pairs of 2500 items, from their powers: (x y + 1)^3 at width 1."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=2500), rng.normal(size=2100)

    def pairs(x: np.ndarray, y: np.ndarray) -> float:
        ways = (1, 3, 3, 1)
        return float(sum(w * (x**k).sum() * (y**k).sum() for k, w in enumerate(ways)))

    own = sum((pairs(x, x) - ((x * x + 1) ** 3).sum()) / (len(x) * (len(x) - 1)) for x in (a, b))
    wanted = own - 2 * pairs(a, b) / (len(a) * len(b))
    assert squared_mmd(a[:, None], b[:, None]) == pytest.approx(wanted, rel=1e-9)


def test_mean_and_spread_of_the_subsets_that_a_seed_draws() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(30, 2)), rng.normal(size=(20, 2)) + 0.5
    drawn = np.random.default_rng(7)
    values = [
        squared_mmd(a[drawn.choice(30, 9, replace=False)], b[drawn.choice(20, 9, replace=False)])
        for _ in range(4)
    ]
    found = measure_kid(a, b, subsets=4, subset_size=9, seed=7)
    assert (found["mean"], found["std"]) == pytest.approx((np.mean(values), np.std(values)))
    assert found["value"] == pytest.approx(squared_mmd(a, b)) and found["subset_size"] == 9


class Extractor(torch.nn.Module):
    """Images `[N, 3, 8, 8]` uint8 to `[N, 12]`, in double."""

    num_features = 12

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(192, 12, generator=generator, dtype=torch.float64) / 14

    def forward(self, images: Tensor) -> Tensor:
        return (images.flatten(1).double() / 255 @ self.weight).tanh()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(60, 44), (9, 11)], ids=str)
def test_distances_are_torchmetrics_own(sizes: tuple[int, int]) -> None:
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.kid import KernelInceptionDistance

    generator = torch.Generator().manual_seed(1)
    images = [
        torch.randint(low, 256, (n, 3, 8, 8), generator=generator, dtype=torch.uint8)
        for low, n in zip((0, 30), sizes)
    ]
    extractor, size = Extractor(), min(sizes) // 2
    frechet = FrechetInceptionDistance(feature=extractor, normalize=False)
    kid = KernelInceptionDistance(feature=extractor, subsets=6, subset_size=size)
    for theirs in (frechet, kid):
        theirs.set_dtype(torch.float64)
        theirs.update(images[0], real=True)
        theirs.update(images[1], real=False)
    features = [extractor(part) for part in images]
    ours = frechet_distance(*(part.numpy() for part in features))
    assert ours == pytest.approx(float(frechet.compute()), rel=1e-6)
    torch.manual_seed(5)
    mean, _ = kid.compute()
    torch.manual_seed(5)  # the subsets that they drew
    found = [
        squared_mmd(*(part[torch.randperm(len(part))[:size]].numpy() for part in features))
        for _ in range(6)
    ]
    assert np.mean(found) == pytest.approx(float(mean), rel=1e-6)


@pytest.mark.parametrize("n", [1, 7, 20, 1000])  # rounding passes 0 at 7, 1 at 20
def test_intervals_are_scipys(n: int) -> None:
    from scipy.stats import binomtest

    for k in sorted({0, 1, n // 3, n - 1, n}):
        wanted = binomtest(k, n).proportion_ci(0.95, method="wilson")
        assert wilson(k / n, n) == pytest.approx((wanted.low, wanted.high), abs=1e-6)
        assert 0 <= wilson(k / n, n)[0] < wilson(k / n, n)[1] <= 1
    found = report.sum_verdicts([{"whole": k < 2} for k in range(4)] + [None])
    assert found is not None and found["n"] == 4 and found["shares"] == {"whole": 0.5}
