"""Is a sampler exact? Equality for guarantees of bits, a G-test for those of a distribution.

Sequences come from a language small enough to enumerate; `power` states how likely a deviation was
to be seen. Chi-square and noncentral chi-square tails are scipy's. R. R. Sokal, F. J. Rohlf,
"Biometry", 3rd edition 1995, chapter 17 (G-test and the pooling of small cells); D. A. Williams,
"Improved likelihood ratio tests for complete contingency tables", Biometrika 63 (1976), whose
divisor brings the test to its level (else a right sampler is rejected half as often again); J.
Cohen, "Statistical Power Analysis for the Behavioral Sciences", 2nd edition 1988, chapter 7.

Departures: cells are pooled by the expected counts alone, so that the pools do not depend on what
was drawn. The power is stated for the worst of all distributions at a given total variation, not
for one assumed alternative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.checks import importing


@dataclass(frozen=True)
class GTest:
    """Result of a G-test."""

    statistic: float  # G = 2 sum O ln(O / E); infinite if something impossible was seen
    degrees: int  # cells left after pooling, less one
    p_value: float  # probability of so large a G / correction under the distribution
    n_samples: int  # N
    total_variation: float  # between counts / N and the distribution, over the unpooled cells
    floor: float  # its expectation if the distribution is right
    correction: float = 1.0  # divides the statistic before it is compared with chi-square


def count_sequences(tokens: Tensor, vocab_size: int) -> Tensor:
    """How often every sequence occurs, `[V ** L]` int64 in the order of
    `itertools.product(range(V), repeat=L)`, in tokens `[N, L]` int64."""
    code = torch.zeros_like(tokens[:, 0])
    for column in tokens.unbind(1):
        code = code * vocab_size + column
    return torch.bincount(code, minlength=vocab_size ** tokens.shape[1])


def g_test(counts: Tensor, distribution: Tensor, smallest: float = 5.0) -> GTest:
    """Compare counts with a distribution (Sokal and Rohlf, chapter 17), `[K]` both.

    `p_value` is 0 if a cell of probability 0 was hit.
    """
    distribution, n = distribution.double(), int(counts.sum())
    distance, floor = total_variation(counts / n, distribution), sampling_floor(distribution, n)
    if bool((counts[distribution <= 0] > 0).any()):
        return GTest(math.inf, int((distribution > 0).sum()) - 1, 0.0, n, distance, floor)
    expected = distribution / distribution.sum() * n  # scipy compares the sums to 8 digits
    pool = pool_cells(expected, smallest)
    n_pools = int(pool.max()) + 1
    zeros = torch.zeros(n_pools, dtype=torch.float64)
    observed = zeros.index_add(0, pool, counts.double())
    expected = zeros.index_add(0, pool, expected)
    test = import_stats().power_divergence(observed, expected, lambda_="log-likelihood")
    statistic = max(0.0, float(test.statistic))
    correction = williams_correction(expected / n, n)
    return _finish(statistic, n_pools - 1, n, distance, floor, correction)


def compare_counts(first: Tensor, second: Tensor) -> GTest:
    """Compare how often two samplers came into each cell, `[K]`, no cell empty in both (Sokal and
    Rohlf, section 17.4, with Williams' correction for tables).
    """
    table = torch.stack([first, second]).double()  # [2, K]
    rows, columns, n = table.sum(1), table.sum(0), float(table.sum())
    chances = columns / n
    variance = chances * (1 - chances) * (1 / rows).sum()
    floor = float((2 / math.pi * variance).sqrt().sum() / 2)  # of normal differences
    distance = total_variation(table[0] / rows[0], table[1] / rows[1])
    degrees = table.shape[1] - 1
    if not degrees:
        return _finish(0.0, 0, int(n), distance, floor, 1.0)
    test = import_stats().chi2_contingency(
        table.numpy(), correction=False, lambda_="log-likelihood"
    )
    spread = (n * float((1 / rows).sum()) - 1) * (n * float((1 / columns).sum()) - 1)
    correction = 1 + spread / (6 * n * degrees)
    return _finish(float(test.statistic), degrees, int(n), distance, floor, correction)


def _finish(
    statistic: float, degrees: int, n: int, distance: float, floor: float, correction: float
) -> GTest:
    """A test with its probability; 1 of a single pool, which leaves no degrees."""
    tail = float(import_stats().chi2.sf(statistic / correction, degrees)) if degrees else 1.0
    return GTest(statistic, degrees, tail, n, distance, floor, correction)


def williams_correction(distribution: Tensor, n_samples: int) -> float:
    """What G of N samples is larger by, on average, than the chi-square it is compared with
    (Williams, 1976): 1 + (sum 1 / p - 1) / (6 N (K - 1)) of pools `[K]`."""
    degrees = len(distribution) - 1
    return 1 + (float((1 / distribution).sum()) - 1) / (6 * n_samples * degrees) if degrees else 1.0


def combine(tests: Sequence[GTest]) -> GTest:
    """Independent tests as one: statistics, degrees and counts add up, the rest is means by N."""
    n, degrees = sum(test.n_samples for test in tests), sum(test.degrees for test in tests)
    statistic = sum(test.statistic for test in tests)
    distance = sum(test.total_variation * test.n_samples for test in tests) / n
    floor = sum(test.floor * test.n_samples for test in tests) / n
    if not math.isfinite(statistic):
        return GTest(statistic, degrees, 0.0, n, distance, floor)
    corrected = sum(test.statistic / test.correction for test in tests)
    correction = statistic / corrected if corrected else 1.0
    return _finish(statistic, degrees, n, distance, floor, correction)


def pool_cells(expected: Tensor, smallest: float = 5.0) -> Tensor:
    """Pools of cells, `[K]` int64 from 0, from the least likely on, each to expect `smallest` of
    `expected` `[K]`. What is left at the end joins the last pool.
    """
    order = expected.argsort(stable=True)
    pools, pool, mass = [], 0, 0.0
    for value in expected[order].tolist():
        if mass >= smallest:
            pool, mass = pool + 1, 0.0
        pools.append(pool)
        mass += value
    if mass < smallest and pool > 0:
        pools = [min(p, pool - 1) for p in pools]
    return torch.empty_like(order).scatter_(0, order, torch.tensor(pools, dtype=torch.int64))


def total_variation(first: Tensor, second: Tensor) -> float:
    return float((first.double() - second.double()).abs().sum() / 2)


def sampling_floor(distribution: Tensor, n_samples: int) -> float:
    """Expected total variation between a distribution `[K]` and N samples of it: noise alone.

    Binomial mean deviations by De Moivre's closed form (P. Diaconis, S. Zabell, "Closed Form
    Summation for Classical Distributions", Statistical Science 1991, section 1).
    """
    chances = distribution.double().clamp(0, 1)
    p = chances[(chances > 0) & (chances < 1)].numpy()
    k = (n_samples * p).astype(int) + 1  # E|X - N p| = 2 k (1 - p) P(X = k)
    deviations = k * (1 - p) * import_stats().binom.pmf(k, n_samples, p)
    return float(deviations.sum()) / n_samples


def first_divergence(first: Tensor, second: Tensor) -> Tensor:
    """First differing index of each row of two `[B, L]` int64, `[B]`; L where there is none."""
    return (first == second).long().cumprod(1).sum(1)


def power(total_variation: float, n_samples: float, degrees: int, level: float) -> float:
    """Least probability to reject, at p-values below `level`, what is at this total variation.

    The noncentrality N sum (p' - p)^2 / p is at least 4 N TV^2 (Cauchy and Schwarz) for every p';
    TV is over the pooled cells, N of two samples of N and M is N M / (N + M).
    """
    if not degrees:
        return 0.0
    stats = import_stats()
    noncentrality = 4 * n_samples * total_variation**2
    return float(stats.ncx2.sf(stats.chi2.isf(level, degrees), degrees, noncentrality))


def import_stats() -> Any:
    with importing(
        "G-test: expected scipy, received no such package; pip install 'mmaccel[evaluation]', "
        "or leave the test out with --samples 0"
    ):
        from scipy import stats
    return stats
