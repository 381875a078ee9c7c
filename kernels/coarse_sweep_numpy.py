"""`coarse_sweep` on a CPU, in numpy: what a slot does not need is not computed.

A slot whose neighbours have not changed costs one comparison, and the scores of all tokens are
computed only where no pass has seen the slot.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mmaccel.kernels.coarse_sweep import SweepSlots, SweepWeights


def coarse_sweep(
    weights: SweepWeights, slots: SweepSlots, work: Tensor, scale: float, n_corrected: int
) -> Tensor:
    """See `mmaccel.kernels.coarse_sweep.coarse_sweep`; all tensors are on the CPU."""
    drafts = torch.empty_like(slots.columns)
    arrays = _Arrays(weights, scale, n_corrected)
    of_rows = [value.numpy() for value in slots]
    for b in range(len(drafts)):
        arrays.sweep_row(work[b].numpy(), drafts[b].numpy(), *(value[b] for value in of_rows))
    return drafts


class _Arrays:
    """The weights as arrays; one sweep of a row.

    Rows go one by one: a step of all rows together takes as long (measured for 8), because what
    costs is the reading of the table and the calls for single rows.
    """

    def __init__(self, weights: SweepWeights, scale: float, n_corrected: int) -> None:
        self.table, self.inner, self.bias, self.head, self.head_bias = (
            value.numpy() for value in weights
        )
        self.scale, self.n_corrected = scale, n_corrected

    def sweep_row(
        self, work: np.ndarray, drafts: np.ndarray, columns: np.ndarray, neighbours: np.ndarray,
        is_seen: np.ndarray, is_fixed: np.ndarray, seen: np.ndarray, base: np.ndarray,
        hidden_seen: np.ndarray, ids: np.ndarray, values: np.ndarray, last: np.ndarray,
        gates: np.ndarray, noise: np.ndarray,
    ) -> None:  # fmt: skip
        """Write the drafts of one row; arguments as in `SweepSlots`, without their first axis."""
        offsets = np.arange(neighbours.shape[1]) * (len(self.head) + 1)
        was_seen, fixed, n = is_seen.tolist(), is_fixed.tolist(), self.n_corrected
        impossible = last == float("-inf")
        last = np.where(impossible, 0, last)
        for k, column in enumerate(columns.tolist()):
            now = work.take(neighbours[k])
            # compared as bytes: a tenth of the time of an array of bools
            if fixed[k] or (was_seen[k] and now.tobytes() == seen[k].tobytes()):
                drafts[k] = work[column]
                continue
            now += offsets
            first = self.table.take(now, 0).sum(0)
            first += base[k]
            np.maximum(first, 0, out=first)
            hidden = first @ self.inner
            hidden += self.bias
            np.maximum(hidden, 0, out=hidden)
            hidden += first
            if was_seen[k]:
                hidden -= hidden_seen[k]
                moved = self.head.take(ids[k, :n], 0) @ hidden
                moved *= self.scale
                scores = values[k].copy()
                scores[:n] += moved
                token = ids[k, scores.argmax()]
            else:
                scores = self.head @ hidden
                scores += self.head_bias
                scores *= self.scale
                scores += last * gates[k]
                scores[impossible] = float("-inf")
                scores += noise[k]
                token = scores.argmax()
            drafts[k] = work[column] = token
