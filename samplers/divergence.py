"""What a run committed and computed, and a bound on the divergence that this cost.

H. Ben-Hamu et al., "Accelerated Sampling from Masked Diffusion Models via Entropy Bounded
Unmasking", NeurIPS 2025, arXiv 2505.24857, section 5: if a set S of slots is committed in one step
from their marginals, the Kullback-Leibler divergence from a draw out of their joint distribution
equals their total correlation, which is at most the sum of their entropies less the largest.

The costs of a row's steps add up (chain rule). If every path spends at most b nats, a row is within
b nats of stepwise decoding, and within total variation sqrt(b / 2) (Pinsker), relative to the
model's conditionals, taken as those of one joint distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.results import Stats


def bound_nats(entropy: Tensor, chosen: Tensor) -> Tensor:
    """The most nats, `[B]` float64, that committing `chosen` costs; both `[B, Q]`."""
    spread = torch.where(chosen, entropy.double(), 0.0)
    return (spread.sum(1) - spread.amax(1)).clamp(min=0)


class DivergenceBound:
    """Counts and costs of B rows."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.nats = torch.zeros(batch, dtype=torch.float64, device=device)  # [B], spent so far
        # entries that went through the model
        self.positions = torch.zeros((), dtype=torch.int64, device=device)
        self.passes = self.canvases = 0
        # [B], passes that every row has taken part in, up to the last `charge`
        self.row_passes = torch.zeros(batch, dtype=torch.int64, device=device)
        self._gains: list[Tensor] = []  # [B] each
        self._extra = torch.zeros(batch, dtype=torch.int64, device=device)
        self._since = [0] * batch  # index into _gains where the row of each batch slot began
        # passes and nats of rows that have left their batch slot
        self._left = torch.zeros(2, dtype=torch.float64, device=device)

    def restart(self, batch_slots: Tensor) -> None:
        """Begin new rows in `batch_slots`, `[n]` int64; the sums over all rows stay."""
        passes = self.row_passes[batch_slots].sum().double()
        self._left += torch.stack([passes, self.nats[batch_slots].sum()])
        self.nats = self.nats.index_fill(0, batch_slots, 0.0)
        self.row_passes = self.row_passes.index_fill(0, batch_slots, 0)
        for batch_slot in batch_slots.tolist():
            self._since[batch_slot] = len(self._gains)

    def forget(self, batch_slots: list[int]) -> None:
        """Forget what was gained before the rows of `batch_slots` began: nobody reports it."""
        first = min(self._since[k] for k in batch_slots)
        del self._gains[:first]
        self._since = [max(0, since - first) for since in self._since]

    def row(self, batch_slot: int) -> tuple[list[int], int, float]:
        """Of the row in a batch slot: slots gained in each pass that gained some, passes, nats."""
        since = self._gains[self._since[batch_slot] :]
        gained = torch.stack(since)[:, batch_slot].tolist() if since else []
        gains = [n for n in gained if n > 0]
        return gains, int(self.row_passes[batch_slot]), float(self.nats[batch_slot])

    def count_pass(self, n_entries: int | Tensor, n_canvases: int) -> None:
        """Count a pass over `n_entries` entries of `n_canvases` canvases."""
        self.passes += 1
        self.canvases += n_canvases
        self.positions += n_entries

    def charge(self, n_new: Tensor, nats: Tensor, was_open: Tensor) -> None:
        """Count a pass: `n_new` `[B]` slots for `nats` `[B]`, in the rows `was_open` `[B]` bool."""
        self._gains.append(n_new + self._extra)
        self.row_passes = self.row_passes + (was_open | (self._extra > 0))
        self._extra = torch.zeros_like(n_new)
        self.nats = self.nats + nats

    def add_gain(self, n_new: Tensor) -> None:
        """Slots `[B]` int64 that the pass gained on top of those of the next `charge`."""
        self._extra = n_new

    def report(self, stats: Stats, lengths: Tensor) -> Tensor:
        """Fill in statistics; `[B]` int64, passes that every row took part in."""
        stats.passes = self.passes
        stats.row_passes = int(self.row_passes.sum() + self._left[0])
        stats.tokens = int(lengths.sum())
        stats.nats = float(self.nats.sum() + self._left[1])
        stats.positions = int(self.positions)
        stats.canvases = self.canvases
        if self._gains:
            gains = torch.stack(self._gains)
            stats.accepted = torch.bincount(gains[gains > 0] - 1).tolist()
        return self.row_passes.clone()
