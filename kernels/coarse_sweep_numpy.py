"""`coarse_sweep` on a CPU, in numpy: what a slot does not need is not computed.

A slot whose neighbours have not changed costs one comparison, and the scores of all tokens are
computed only where no pass has seen the slot.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from mmaccel.kernels.coarse_sweep import SweepSlots, SweepWeights


def coarse_sweep(
    weights: SweepWeights, slots: SweepSlots, work: Tensor, scale: float, n_corrected: int
) -> Tensor:
    """See `mmaccel.kernels.coarse_sweep.coarse_sweep`; all tensors are on the CPU."""
    sweep = RowSweep(weights)
    of_rows = [value.numpy() for value in slots]
    for b in range(len(work)):
        row = (value[b] for value in of_rows)
        sweep.run(work[b].numpy(), scale, n_corrected, *row)
    return work.gather(1, slots.columns)


class RowSweep:
    """The weights as arrays; sweeps of a row.

    Rows go one by one: a step of all rows together takes as long (measured for 8), because what
    costs is the reading of the table and the calls for single rows.

    Args:
        weights: float32 on a CPU; what is written to them later counts.
    """

    def __init__(self, weights: SweepWeights) -> None:
        self.table, self.inner, self.bias, self.head, self.head_bias = (
            value.detach().numpy() for value in weights
        )

    def run(
        self, work: np.ndarray, scale: float, n_corrected: int, columns: np.ndarray,
        neighbours: np.ndarray, is_seen: np.ndarray, is_fixed: np.ndarray, seen: np.ndarray,
        base: np.ndarray, hidden_seen: np.ndarray, ids: np.ndarray, values: np.ndarray,
        last: np.ndarray, gates: np.ndarray, noise: np.ndarray,
        law: np.ndarray | None = None,
    ) -> list[int]:  # fmt: skip
        """Write the drafts of one row into `work`.

        Args:
            work, scale, n_corrected: as in `coarse_sweep`, of one row.
            columns: and all that follow as in `SweepSlots`, without their first axis. What only
                seen slots need may end after the last of these.
            law: `[K, V]` float32, the last pass's scores; those of the slots that are drafted anew
                become the scores from which they are drafted, without their noise.

        Returns:
            The slots that were drafted anew, as places in 0..K-1.
        """
        n_neighbours, n = neighbours.shape[-1], n_corrected
        offsets = np.arange(n_neighbours) * (len(self.head) + 1)
        rows = np.empty((n_neighbours, len(self.bias)), np.float32)
        ones, zeros = np.ones(n_neighbours, np.float32), np.zeros(len(self.bias), np.float32)
        first, hidden = np.empty((2, len(self.bias)), np.float32)
        was_seen, fixed, drafted = is_seen.tolist(), is_fixed.tolist(), []
        impossible = None if all(was_seen) else last == float("-inf")
        if impossible is not None and impossible.any():
            last = np.where(impossible, 0, last)
        else:
            impossible = None
        for k, column in enumerate(columns.tolist()):
            if fixed[k]:
                continue
            now = work.take(neighbours[k])
            # compared as bytes: a tenth of the time of an array of bools
            if was_seen[k] and now.tobytes() == seen[k].tobytes():
                continue
            drafted.append(k)
            now += offsets
            self.table.take(now, 0, rows, "clip")  # any mode but this one copies once more
            np.dot(ones, rows, first)  # their sum
            first += base[k]
            np.maximum(first, zeros, out=first)  # an array: a number takes twice as long
            np.dot(first, self.inner, hidden)
            hidden += self.bias
            np.maximum(hidden, zeros, out=hidden)
            hidden += first
            if was_seen[k]:
                hidden -= hidden_seen[k]
                moved = self.head.take(ids[k, :n], 0).dot(hidden)
                if scale != 1:
                    moved *= scale
                scores = values[k].copy()
                scores[:n] += moved
                token = ids[k, scores.argmax()]
                if law is not None:
                    law[k, ids[k, :n]] += moved
            else:
                scores = self.head.dot(hidden)
                scores += self.head_bias
                if scale != 1:
                    scores *= scale
                scores += last * gates[k]
                if impossible is not None:
                    scores[impossible] = float("-inf")
                if law is not None:
                    law[k] = scores
                scores += noise[k]
                token = scores.argmax()
            work[column] = token
        return drafted
