"""The tally: what the passes of a run gained and spent, kept on the device until somebody looks."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.results import Stats


class Tally:
    """Counts of B rows.

    Args:
        batch: B.
        capacity: most passes there can be.
        device: where the rows are.

    Attributes:
        passes: `[]` int64, passes counted.
        is_bad: `[]` bool, whether a kept token was drawn from scores that are no law.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device) -> None:
        self.passes = torch.zeros((), dtype=torch.int64, device=device)
        self.is_bad = torch.zeros((), dtype=torch.bool, device=device)
        self._gains = torch.zeros(capacity, batch, dtype=torch.int64, device=device)
        self._spent = torch.zeros((), dtype=torch.float64, device=device)

    def clear(self) -> None:
        """Begin anew, in the same tensors."""
        for counter in (self.passes, self.is_bad, self._gains, self._spent):
            counter.zero_()

    def count(self, n_new: Tensor, variation: Tensor | None) -> None:
        """Count a pass.

        Args:
            n_new: `[B]` int64, tokens every row gained.
            variation: `[B, W-1]`, total variation that judging each draft slot cost; slots whose
                tokens were not kept are not charged. None spends nothing.
        """
        self._gains.index_copy_(0, self.passes[None], n_new[None])
        self.passes += 1
        if variation is not None:
            index = torch.arange(variation.shape[1], device=n_new.device)[None]
            charged = variation.masked_fill(index >= n_new[:, None], 0)
            self._spent += charged.sum(dtype=torch.float64)

    def report(self, stats: Stats) -> Tensor:
        """Fill in statistics; returns `[B]` int64, passes in which every row gained something."""
        gained = self._gains[: int(self.passes)]  # [passes, B]
        passes = (gained > 0).sum(0)
        stats.accepted = torch.bincount(gained[gained > 0] - 1).tolist()
        stats.row_passes = int(passes.sum())
        stats.tokens = int(gained.sum())
        stats.total_variation = float(self._spent)
        return passes
