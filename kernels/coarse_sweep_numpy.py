"""`coarse_sweep` on a CPU, in numpy: what a slot does not need is not computed.

A slot whose neighbours have not changed costs one comparison, and the scores of all tokens are
computed only where no pass has seen the slot. `RowSweep.redraft` also makes what a sweep knows of
its slots. A row's slots are two ranges, those that the last pass has seen and the new ones behind
them, so that nothing is gathered, and what lies before the first slot whose neighbours have changed
is left as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.kernels.coarse_sweep import SweepSlots, SweepWeights
from mmaccel.kernels.truncation_numpy import largest


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


class SlotWeights(NamedTuple):
    """What C knows of a slot before its neighbours are sums of these, float32."""

    state: Tensor  # [D, H]: of the large model's state, input first
    slots: Tensor  # [S, H]: of the slot; the last one's serves all that follow
    distances: Tensor  # [R, H]: of how far the state's slot lies back, the same
    gates: Tensor  # [R]: `SweepSlots.gates` before scaling


class RowPass(NamedTuple):
    """What is kept of a row of the last pass, whose window had W slots."""

    seen: np.ndarray  # [W, N] int64: ids of the slots' neighbours
    states: Tensor  # [W, D] float32
    scores: np.ndarray  # [W, V] float32: those that noise is added to
    last: np.ndarray  # [V] float32: of the last slot
    prompt: np.ndarray  # [H] float32: what C makes of the prompt


class RowSweep:
    """The weights as arrays; sweeps of a row.

    Rows go one by one: a step of all rows together takes as long (measured for 8), because what
    costs is the reading of the table and the calls for single rows.

    Args:
        weights: float32 on a CPU; what is written to them later counts.
        slots: what `redraft` knows of slots; None where that is nothing but `prompt`.
    """

    def __init__(self, weights: SweepWeights, slots: SlotWeights | None = None) -> None:
        self.weights, self.slots = weights, slots
        self.table, self.inner, self.bias, self.head, self.head_bias = (
            value.detach().numpy() for value in weights
        )
        n_ids = len(self.head) + 1
        self.offsets = np.arange(len(self.table) // n_ids) * n_ids  # of every neighbour's rows
        self.ones = np.ones(len(self.offsets), np.float32)
        self.zeros = np.zeros(len(self.bias), np.float32)

    def redraft(
        self,
        work: np.ndarray,
        column: int,
        neighbours: np.ndarray,
        slot: int,
        kept: RowPass,
        moved: int,
        width: int,
        noise: np.ndarray,
        is_fixed: np.ndarray | None,
        scale: float,
        candidates: int,
        recorded: np.ndarray | None = None,
    ) -> list[int]:
        """Write the drafts of one row into `work`.

        Args:
            work, scale: as in `coarse_sweep`, of one row.
            column: of the first draft.
            neighbours: `[K, N]` int64, columns, for K drafts.
            slot: of the first draft.
            kept: of the last pass.
            moved: where the first draft stood in that pass's window.
            width: of that window.
            noise: `[K, V]` float32, frozen noise; -inf where a token is not allowed.
            is_fixed: `[K]` bool; None if none is.
            candidates: how many stale scores of a slot are corrected.
            recorded: `[K, V]`, into which the scores of all slots drafted anew are written,
                without noise. Candidates then are the most likely tokens, whatever the noise, and
                the best of all others, which is not corrected. None: those with the best scores.

        Returns:
            The drafts that were drafted anew, as places in 0..K-1.
        """
        n_slots = len(neighbours)
        n_seen = min(width - moved, n_slots)
        seen = kept.seen[moved : moved + n_seen]
        changed = (work.take(neighbours[:n_seen]) != seen).any(1)
        start = int(changed.argmax()) if changed.any() else n_seen
        if start == n_slots:
            return []
        n_old, n_new = n_seen - start, n_slots - n_seen
        at = np.arange(n_old + n_new)
        distances = at + (1 - n_old)  # below 1 where the state is the slot's own

        base = np.empty((len(at), len(self.bias)), np.float32)
        base[:] = kept.prompt
        gates = self.zeros  # which only new slots read
        if self.slots is not None:
            end = moved + n_seen
            states = kept.states[min(moved + start, end - 1) : end]  # new slots take the last one
            base += (states @ self.slots.state).numpy().take(at, 0, mode="clip")
            base += self.slots.slots.numpy().take(at + (slot + start), 0, mode="clip")
            base += self.slots.distances.numpy().take(distances, 0, mode="clip")
            if n_new:
                gates = self.slots.gates.numpy().take(distances, mode="clip") * np.float32(scale)

        stale = kept.scores[moved + start : moved + n_seen]
        perturbed = stale + noise[start:n_seen]
        n = min(candidates, stale.shape[1] - (recorded is not None))
        ids = largest(perturbed if recorded is None else stale, n)
        at_rows = np.arange(n_old)[:, None] * stale.shape[1]
        values = perturbed.take(ids + at_rows)
        own_recorded = None
        if recorded is not None:
            np.put(perturbed, ids + at_rows, float("-inf"))
            others = perturbed.argmax(1)[:, None]
            values = np.append(values, perturbed.take(others + at_rows), 1)
            ids = np.append(ids, others, 1)
            own_recorded = recorded[start:]
            own_recorded[:n_old] = stale

        if is_fixed is None:
            is_fixed = np.zeros(n_slots, bool)
        hidden_seen = self._hidden(seen[start:], base[:n_old])
        drafted = self.run(
            work, scale, n, at + (column + start), neighbours[start:], at < n_old,
            is_fixed[start:], seen[start:], base, hidden_seen, ids, values, kept.last, gates,
            noise[start:], own_recorded,
        )  # fmt: skip
        return [start + k for k in drafted]

    def _hidden(self, neighbours: np.ndarray, base: np.ndarray) -> np.ndarray:
        """h of slots, `[n, H]`, whose neighbours are `[n, N]` int64."""
        index = torch.from_numpy(neighbours + self.offsets)
        first = F.embedding_bag(index, self.weights.table, mode="sum")
        first.add_(torch.from_numpy(base)).relu_()
        hidden = torch.addmm(self.weights.inner_bias, first, self.weights.inner)
        return hidden.relu_().add_(first).numpy()

    def run(
        self, work: np.ndarray, scale: float, n_corrected: int, columns: np.ndarray,
        neighbours: np.ndarray, is_seen: np.ndarray, is_fixed: np.ndarray, seen: np.ndarray,
        base: np.ndarray, hidden_seen: np.ndarray, ids: np.ndarray, values: np.ndarray,
        last: np.ndarray, gates: np.ndarray, noise: np.ndarray,
        recorded: np.ndarray | None = None,
    ) -> list[int]:  # fmt: skip
        """Write the drafts of one row into `work`.

        Args:
            work, scale, n_corrected: as in `coarse_sweep`, of one row.
            columns: and all that follow as in `SweepSlots`, without their first axis. What only
                seen slots need may end after the last of these.
            recorded: `[K, V]` float32, the last pass's scores; those of the slots drafted anew
                become the scores from which they are drafted, without their noise.

        Returns:
            The slots that were drafted anew, as places in 0..K-1.
        """
        n, offsets, ones, zeros = n_corrected, self.offsets, self.ones, self.zeros
        rows = np.empty((len(ones), len(zeros)), np.float32)
        first, hidden = np.empty_like(zeros), np.empty_like(zeros)
        take_rows, take_head, inner, bias = self.table.take, self.head.take, self.inner, self.bias
        was_seen, fixed, drafted = is_seen.tolist(), is_fixed.tolist(), []
        impossible = None
        if not all(was_seen):
            impossible = last == float("-inf")
            if impossible.any():
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
            take_rows(now, 0, rows, "clip")  # any mode but this one copies once more
            np.dot(ones, rows, first)  # their sum
            first += base[k]
            np.maximum(first, zeros, out=first)  # an array: a number takes twice as long
            np.dot(first, inner, hidden)
            hidden += bias
            np.maximum(hidden, zeros, out=hidden)
            hidden += first
            if was_seen[k]:
                hidden -= hidden_seen[k]
                own = ids[k]
                scores = take_head(own, 0).dot(hidden)
                if scale != 1:
                    scores *= scale
                if n < len(own):
                    scores[n:] = 0
                if recorded is not None:
                    recorded[k, own[:n]] += scores[:n]
                scores += values[k]
                token = own[scores.argmax()]
            else:
                scores = self.head.dot(hidden)
                scores += self.head_bias
                if scale != 1:
                    scores *= scale
                scores += last * gates[k]
                if impossible is not None:
                    scores[impossible] = float("-inf")
                if recorded is not None:
                    recorded[k] = scores
                scores += noise[k]
                token = scores.argmax()
            work[column] = token
        return drafted


def read_tokens(tokens: np.ndarray, n_ids: int) -> np.ndarray:
    """A row's tokens `[N]` int64 as a sweep reads them, `[N + 1]`: V for padding and at the end."""
    work = np.empty(len(tokens) + 1, np.int64)
    work[-1] = n_ids
    unsigned = np.uint64  # among which -1, padding, is the largest
    np.minimum(tokens.view(unsigned), unsigned(n_ids), out=work[:-1].view(unsigned))
    return work
