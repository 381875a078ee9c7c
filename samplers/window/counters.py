"""RunCounters: what the passes of a run gained and spent, on the device until the run ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmaccel.results import Stats
from mmaccel.samplers.window.step_state import StaticPart


class RunCounters(StaticPart):
    """Counts of B rows.

    Args:
        batch: B.
        capacity: more passes than those in which a row can gain tokens.
        device: of the counters.

    Attributes:
        passes: `[B]` int64, passes counted since a row began.
        is_bad: `[B]` bool, rows that wanted a token of NaN or infinite scores.
        gains: `[capacity, B]` int64, tokens gained in each pass.
        spent: `[B]` float64, total variation.
    """

    static = ("passes", "is_bad", "gains", "spent")

    def __init__(self, batch: int, capacity: int, device: torch.device) -> None:
        self.passes = torch.zeros(batch, dtype=torch.int64, device=device)
        self.is_bad = torch.zeros(batch, dtype=torch.bool, device=device)
        self.gains = torch.zeros(capacity, batch, dtype=torch.int64, device=device)
        self.spent = torch.zeros(batch, dtype=torch.float64, device=device)

    def restart(self, rows: Tensor) -> None:
        """Begin anew with some rows, `[n]` int64."""
        for counter in (self.passes, self.is_bad, self.spent):
            counter[rows] = 0
        self.gains[:, rows] = 0

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with some rows alone, `[n]` int64."""
        self.passes, self.is_bad = self.passes[rows], self.is_bad[rows]
        self.gains, self.spent = self.gains[:, rows], self.spent[rows]

    def row(self, index: int) -> tuple[list[int], float]:
        """Tokens that a row gained in each pass that gained some, and total variation spent."""
        gained = self.gains[:, index]
        return gained[gained > 0].tolist(), float(self.spent[index])

    def report(self, stats: Stats) -> Tensor:
        """Fill in statistics; returns `[B]` int64, the passes in which each row gained tokens."""
        gained = self.gains  # [passes, B]
        passes = (gained > 0).sum(0)
        stats.accepted = count_gains(gained[gained > 0].tolist())
        stats.row_passes = int(passes.sum())
        stats.tokens = int(gained.sum())
        stats.total_variation = float(self.spent.sum())
        return passes


def count_gains(gained: Sequence[int]) -> list[int]:
    """How often each number of tokens was gained, from 1 on: `Stats.accepted`."""
    counts = [0] * max(gained, default=0)
    for n in gained:
        counts[n - 1] += 1
    return counts
