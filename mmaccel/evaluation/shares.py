"""Shares of right answers, and differences of two sides that answered the same questions.

95 % intervals: of shares Wilson's, of paired differences D. G. Bonett's and R. M. Price's adjusted
one ("Adjusted Wald confidence interval for a difference of binomial proportions based on paired
data", Journal of Educational and Behavioral Statistics 37, 2012), which holds for few disagreements
too. Both take questions for independent.
"""

from __future__ import annotations

import math
from typing import Any

_Z = 1.959964  # of a two-sided 95 %


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share of n (E. B. Wilson, 1927), which holds at 0 and 1 too."""
    middle = (share + _Z * _Z / (2 * n)) / (1 + _Z * _Z / n)
    half = _Z * math.sqrt(share * (1 - share) / n + _Z * _Z / (4 * n * n)) / (1 + _Z * _Z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def share_of(right: str) -> dict[str, Any] | None:
    """The share of "1", its interval and the number of questions; None without any."""
    if not right:
        return None
    share = right.count("1") / len(right)
    low, high = wilson(share, len(right))
    figures = {"right": share, "low": low, "high": high}
    return {name: round(x, 5) for name, x in figures.items()} | {"questions": len(right)}


def paired_difference(first: str, second: str) -> dict[str, Any] | None:
    """Accuracy of the first less that of the second, on questions that both answered ("1": right).

    `difference`, its 95 % interval `low` and `high`, `only_first` and `only_second`: questions that
    one of them alone answered rightly. None without questions.
    """
    pairs = list(zip(first, second, strict=False))
    if not pairs:
        return None
    gained, lost = pairs.count(("1", "0")), pairs.count(("0", "1"))
    n = len(pairs) + 2
    up, down = (gained + 1) / n, (lost + 1) / n
    half = _Z * math.sqrt((up + down - (up - down) ** 2) / n)
    figures = {
        "difference": (gained - lost) / len(pairs),
        "low": max(up - down - half, -1.0),
        "high": min(up - down + half, 1.0),
    }
    rounded = {name: round(x, 5) for name, x in figures.items()}
    return rounded | {"only_first": gained, "only_second": lost}
