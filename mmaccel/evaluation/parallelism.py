"""Accuracy under parallelism: one number for a policy's settings, from slow and right to fast.

Y.-Y. Qian, J. Su, L. Hu, P. Zhang, Z. Deng, P. Zhao, H. Zhang, "d3LLM: Ultra-Fast Diffusion LLM
using Pseudo-Trajectory Distillation", ICML 2026 (arXiv 2601.07568), and the authors' leaderboard:
of points (tokens a pass rho_i, accuracy y_i in percent) with rho rising,

    AUP = rho_1 y_1 + sum over i > 1 of (rho_i - rho_{i-1}) (y_i W(y_i) + y_{i-1} W(y_{i-1})) / 2,

with the weight W(y) = min(exp(-3 (1 - y / y_max)), 1), which counts what loses accuracy for less.
Points below y_1 - 5 are left out; y_max is the best accuracy of the task.

Departures: none in the formula. y_max is the best of what was measured here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

PENALTY = 3.0
MOST_LOST = 5.0  # points below that of the slowest setting

_QUALITY = ("right", "whole")  # what counts as accuracy, the first one that a row has


def accuracy_under_parallelism(points: Sequence[tuple[float, float]], best: float) -> float:
    """The number of some settings.

    Args:
        points: tokens a pass and accuracy in percent, at least one.
        best: the best accuracy of the task, in percent, above 0.
    """
    ordered = sorted(points)
    first = ordered[0]
    kept = [point for point in ordered if point[1] >= first[1] - MOST_LOST]
    total = first[0] * first[1]
    for left, right in zip(kept, kept[1:], strict=False):
        total += (right[0] - left[0]) * (_weigh(left[1], best) + _weigh(right[1], best)) / 2
    return total


def _weigh(accuracy: float, best: float) -> float:
    return accuracy * min(math.exp(-PENALTY * (1 - accuracy / best)), 1.0)


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The number of every policy of every model.

    Args:
        rows: of `mmaccel bench --family canvas`; those without an accuracy are left out.

    Returns:
        A dict per model and class of policies: `model`, `policy`, `aup` and `points`, pairs of
        tokens a pass and accuracy in percent.
    """
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    best: dict[str, float] = {}
    for row in rows:
        for name in [name for name in _QUALITY if name in row["quality"]][:1]:
            accuracy, model = 100 * row["quality"][name], row["model"]
            key = (model, str(row["settings"]).partition("(")[0])
            points.setdefault(key, []).append((row["tokens_per_pass"], accuracy))
            best[model] = max(best.get(model, 0.0), accuracy)
    return [
        {
            "model": model,
            "policy": policy,
            "aup": accuracy_under_parallelism(own, best[model]),
            "points": own,
        }
        for (model, policy), own in points.items()
        if best[model] > 0
    ]
