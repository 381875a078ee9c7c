"""The ledger: what a run committed, how much divergence that can have cost, and what it computed.

H. Ben-Hamu et al., "Accelerated Sampling from Masked Diffusion Models via Entropy Bounded
Unmasking", NeurIPS 2025, arXiv 2505.24857, section 5: slots S committed in one step from their
marginals differ from a draw out of their joint law by a Kullback-Leibler divergence equal to their
total correlation, which is at most the sum of their entropies less the largest of them.

The costs of a row's steps add up (chain rule), so that rows that spend b nats on every path have a
law within b nats of stepwise decoding, and within total variation sqrt(b / 2) (Pinsker). The bound
is relative to the model's own conditionals, taken as those of one joint law.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.results import Stats


def bound_nats(entropy: Tensor, chosen: Tensor) -> Tensor:
    """What committing chosen slots at once costs at most.

    Args:
        entropy: `[B, Q]` float, nats.
        chosen: `[B, Q]` bool.

    Returns:
        `[B]` float64: sum less maximum; 0 for one slot or none.
    """
    spread = torch.where(chosen, entropy.double(), 0.0)
    return (spread.sum(1) - spread.amax(1)).clamp(min=0)


class DivergenceBound:
    """Of B rows.

    Attributes:
        nats: `[B]` float64, spent so far.
        positions: `[]` int64, entries that went through the model.
        passes: passes so far.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.nats = torch.zeros(batch, dtype=torch.float64, device=device)
        self.positions = torch.zeros((), dtype=torch.int64, device=device)
        self.passes = 0
        self._gains: list[Tensor] = []  # [B] each
        self._extra = torch.zeros(batch, dtype=torch.int64, device=device)
        self._taken = torch.zeros(batch, dtype=torch.int64, device=device)
        self._since = [0] * batch
        # passes and nats of rows whose places others have taken
        self._left = torch.zeros(2, dtype=torch.float64, device=device)

    @property
    def row_passes(self) -> Tensor:
        """`[B]` int64, passes that every row has taken part in, up to the last `charge`."""
        return self._taken

    def restart(self, places: Tensor) -> None:
        """Count anew in some places, `[n]` int64; the sums of all rows stay."""
        self._left += torch.stack([self._taken[places].sum().double(), self.nats[places].sum()])
        self.nats = self.nats.index_fill(0, places, 0.0)
        self._taken = self._taken.index_fill(0, places, 0)
        for place in places.tolist():
            self._since[place] = len(self._gains)

    def row(self, place: int) -> tuple[list[int], int, float]:
        """Of the row in a place: slots gained in each pass that gained some, passes, nats."""
        since = self._gains[self._since[place] :]
        own = torch.stack(since)[:, place].tolist() if since else []
        return [n for n in own if n > 0], int(self._taken[place]), float(self.nats[place])

    def compute(self, n_entries: int | Tensor) -> None:
        """Count a pass over so many entries."""
        self.passes += 1
        self.positions += n_entries

    def charge(self, n_new: Tensor, nats: Tensor, was_open: Tensor) -> None:
        """Count what a pass committed.

        Args:
            n_new: `[B]` int64, slots committed.
            nats: `[B]` float64, what that cost.
            was_open: `[B]` bool, rows that took part.
        """
        self._gains.append(n_new + self._extra)
        self._taken += was_open | (self._extra > 0)
        self._extra = torch.zeros_like(n_new)
        self.nats += nats

    def gain(self, n_new: Tensor) -> None:
        """Slots `[B]` int64 that the pass gained on top of what the next `charge` tells."""
        self._extra = n_new

    def report(self, stats: Stats, lengths: Tensor) -> Tensor:
        """Fill in statistics; returns `[B]` int64, passes every row took part in."""
        stats.passes = self.passes
        stats.row_passes = int(self._taken.sum() + self._left[0])
        stats.tokens = int(lengths.sum())
        stats.nats = float(self.nats.sum() + self._left[1])
        stats.positions = int(self.positions)
        if self._gains:
            gains = torch.stack(self._gains)
            stats.accepted = torch.bincount(gains[gains > 0] - 1).tolist()
        return self._taken.clone()
