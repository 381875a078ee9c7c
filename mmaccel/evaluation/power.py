"""How likely a chi-square or G-test is to notice: power by the noncentral chi-square law.

J. Cohen, "Statistical Power Analysis for the Behavioral Sciences", 2nd edition 1988, chapter 7.

A test that rejects nothing proves nothing, so every law test states the smallest deviation it would
have seen. Only torch is needed: the tails are incomplete gamma functions.

Departures: the power is stated for the worst of all laws at a given total variation, not for one
assumed alternative.
"""

from __future__ import annotations

import math

import torch


def power(total_variation: float, n_samples: int, degrees: int, level: float) -> float:
    """Least chance to reject any law at this total variation from the tested one.

    The noncentrality N sum (p' - p)^2 / p is at least 4 N TV^2 (Cauchy and Schwarz), whatever
    p' is, so this is a bound for every bug of that size (that size counted over the pooled cells).

    Args:
        total_variation: of the wrong law from the right one, in 0..1.
        n_samples: N.
        degrees: of the test.
        level: p-value below which the test rejects.
    """
    noncentrality = 4 * n_samples * total_variation**2
    return noncentral_tail(critical_value(degrees, level), degrees, noncentrality)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(chi-square with `degrees` > statistic); 1 with no degrees."""
    if degrees < 1 or statistic <= 0:
        return 1.0
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def critical_value(degrees: int, level: float) -> float:
    """The statistic whose tail is `level`, by bisection."""
    low, high = 0.0, float(degrees + 1)
    while chi_square_tail(high, degrees) > level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_tail(middle, degrees) > level else (low, middle)
    return high


def noncentral_tail(statistic: float, degrees: int, noncentrality: float) -> float:
    """P(noncentral chi-square > statistic), the Poisson mixture of central tails."""
    mean = noncentrality / 2
    reach = 12 * math.sqrt(mean) + 40
    j = torch.arange(max(0, math.floor(mean - reach)), math.ceil(mean + reach), dtype=torch.float64)
    weight = (
        torch.xlogy(j, torch.tensor(mean, dtype=torch.float64)) - mean - torch.lgamma(j + 1)
    ).exp()
    half = torch.tensor(statistic / 2, dtype=torch.float64)
    return float((weight * torch.special.gammaincc(degrees / 2 + j, half)).sum())
