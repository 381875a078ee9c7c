"""Cells of the matrix: few settings in which every pair of values occurs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(factors: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Settings in which every pair of values of two factors occurs; always the same ones.

    Greedy: each setting is the one that has most pairs which have not occurred, the first of them.

    Args:
        factors: values by name; at most some thousand settings in all.
    """
    names = list(factors)
    every = list(product(*(range(len(factors[name])) for name in names)))

    def pairs(setting: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(i, setting[i], j, setting[j]) for i, j in combinations(range(len(names)), 2)}

    wanted = set().union(*map(pairs, every))
    while wanted:
        best = max(every, key=lambda setting: len(pairs(setting) & wanted))
        wanted -= pairs(best)
        yield {name: factors[name][at] for name, at in zip(names, best, strict=True)}


def covering(**factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by `pairwise` settings of its arguments."""
    cells = [tuple(setting.values()) for setting in pairwise(factors)]
    return pytest.mark.parametrize(tuple(factors), cells)
