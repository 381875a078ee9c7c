"""`coarse_rounds` on a CPU, in numpy: what a round does not change is not drafted again.

A slot is drafted if its neighbours' tokens have changed since the round before (in the first, since
the pass), or if no pass has seen it; rounds end when no slot is left. The slots of all rows are one
list, seen ones first: each half is a product of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.kernels.coarse_rounds import Redrafted, SweepSlots, SweepWeights, share_of
from mmaccel.kernels.truncation_numpy import largest

_NO_ID = -1  # what the neighbours of a new slot were before the first round
_NEVER = float("-inf")


def coarse_rounds(
    weights: SweepWeights,
    slots: SweepSlots,
    work: Tensor,
    scale: float,
    n_corrected: int,
    rounds: int,
) -> Redrafted:
    if not slots.columns.numel():
        return Redrafted(slots.columns.clone(), slots.seen)
    n_columns = work.shape[1]
    n_slots = slots.columns.shape[1]
    starts = torch.arange(len(work))[:, None] * n_columns
    columns = (slots.columns + starts).flatten()
    neighbours = (slots.neighbours + starts[..., None]).flatten(0, 1)

    # the list: free slots that a pass has seen, and then the new ones
    is_free = ~slots.is_fixed.flatten()
    is_seen = slots.is_seen.flatten()
    old = (is_seen & is_free).nonzero()[:, 0]
    new = (~is_seen & is_free).nonzero()[:, 0]
    both = torch.cat([old, new])
    gates = slots.gates.flatten()[new][:, None]
    listed = ListedSlots(
        columns[both].numpy(),
        neighbours[both].numpy(),
        slots.seen.flatten(0, 1)[old].numpy(),
        slots.base.flatten(0, 1)[both].numpy(),
        slots.hidden_seen.flatten(0, 1)[old].numpy(),
        slots.ids.flatten(0, 1)[old].numpy(),
        slots.values.flatten(0, 1)[old].numpy(),
        share_of(slots.last[new // n_slots], gates).numpy(),
        slots.noise.flatten(0, 1)[new].numpy(),
    )
    tokens = work.flatten().numpy().copy()
    drafted = Rounds(weights).run(tokens, listed, scale, n_corrected, rounds)
    work.copy_(torch.from_numpy(tokens).view_as(work))
    read = torch.from_numpy(drafted.read.take(neighbours.numpy())).view_as(slots.neighbours)
    return Redrafted(work.gather(1, slots.columns), read)


class ListedSlots(NamedTuple):
    """What rounds know of n slots of any rows, of which a pass has seen the first o."""

    columns: np.ndarray  # [n] int64: where their tokens stand in the tokens of all rows
    neighbours: np.ndarray  # [n, N] int64: where those of their neighbours stand
    seen: np.ndarray  # [o, N] int64: the neighbours' ids which that pass saw
    base: np.ndarray  # [n, H] float32
    hidden_seen: np.ndarray  # [o, H] float32
    ids: np.ndarray  # [o, M] int64: candidates
    values: np.ndarray  # [o, M] float32: their perturbed scores
    shares: np.ndarray  # [n - o, V] float32: of the last slot's scores, at a new slot
    noise: np.ndarray  # [n - o, V] float32


class MadeRounds(NamedTuple):
    """What the last round made n slots from."""

    read: np.ndarray  # the tokens of all rows as it read them
    is_kept: np.ndarray  # [n] bool: slots whose draft is the one before all rounds
    moved: np.ndarray  # [o, M] float32: what was added to the scores of candidates
    fresh: np.ndarray  # [n - o, V] float32: the scores of new slots, without noise


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


class RowWindow(NamedTuple):
    """A row's window before its pass, and what is kept of the last one."""

    work: np.ndarray  # [C] int64: the row's tokens, see `read_tokens`
    column: int  # of the first draft
    neighbours: np.ndarray  # [K, N] int64: columns, for K drafts
    slot: int  # of the first draft
    kept: RowPass
    moved: int  # where the first draft stood in that pass's window
    width: int  # of that window
    noise: np.ndarray  # [K, V] float32: frozen noise; -inf where a token is not allowed
    is_fixed: np.ndarray | None  # [K] bool; None if none is


class RowDrafts(NamedTuple):
    """The drafts of n slots that were drafted anew."""

    rows: np.ndarray  # [n] int64: of the list of windows
    at: np.ndarray  # [n] int64: in their windows
    scores: np.ndarray  # [n, V] float32, without noise; empty if nobody asked


class Rounds:
    """The weights as arrays; rounds over listed slots. What is written to the weights later counts.
    `slots` is what `redraft` knows of slots; None where that is nothing but `RowPass.prompt`.
    """

    def __init__(self, weights: SweepWeights, slots: SlotWeights | None = None) -> None:
        self.weights = weights
        self.slots = slots
        self.head = weights.head.detach().numpy()
        n_ids = len(self.head) + 1
        self.offsets = np.arange(len(weights.table) // n_ids) * n_ids  # of every neighbour's rows

    def find_hidden(self, neighbours: np.ndarray, base: np.ndarray) -> np.ndarray:
        """h of slots, `[n, H]`, whose neighbours are `[n, N]` int64."""
        index = torch.from_numpy(neighbours + self.offsets)
        first = F.embedding_bag(index, self.weights.table, mode="sum")
        first.add_(torch.from_numpy(base)).relu_()
        hidden = torch.addmm(self.weights.inner_bias, first, self.weights.inner)
        return hidden.relu_().add_(first).numpy()

    def run(
        self, work: np.ndarray, slots: ListedSlots, scale: float, n_corrected: int, rounds: int
    ) -> MadeRounds:
        """Write drafts of listed slots into `work` int64, the rows of `read_tokens` one by one."""
        n = len(slots.columns)
        n_old = len(slots.seen)
        before = work.take(slots.columns)
        moved = np.zeros(slots.values.shape, np.float32)
        fresh = np.zeros(slots.shares.shape, np.float32)
        is_kept = np.arange(n) < n_old
        read = np.full(slots.neighbours.shape, _NO_ID)
        read[:n_old] = slots.seen
        tokens_read = work
        for _ in range(rounds):
            tokens_read = work.copy()
            now = work.take(slots.neighbours)
            changed = (now != read).any(1).nonzero()[0]
            if not len(changed):
                break
            read = now
            hidden = self.find_hidden(now.take(changed, 0), slots.base.take(changed, 0))
            split = int(changed.searchsorted(n_old))
            old = changed[:split]
            new = changed[split:] - n_old
            drafts = before.take(changed)
            if split:
                # seen slots: the best of the candidates, unless all is as the pass saw it
                change = hidden[:split] - slots.hidden_seen.take(old, 0)
                ids = slots.ids.take(old, 0)
                scores = np.matmul(self.head.take(ids, 0), change[:, :, None])[:, :, 0]  # [., M]
                if scale != 1:
                    scores *= np.float32(scale)
                scores[:, n_corrected:] = 0
                moved[old] = scores
                scores += slots.values.take(old, 0)
                best = scores.argmax(1)
                is_same = (now.take(old, 0) == slots.seen.take(old, 0)).all(1)
                is_kept[old] = is_same
                corrected = ids[np.arange(split), best]
                drafts[:split] = np.where(is_same, drafts[:split], corrected)
            if len(new):
                # new slots: the best of all tokens
                scores = F.linear(
                    torch.from_numpy(hidden[split:]), self.weights.head, self.weights.head_bias
                ).numpy()
                if scale != 1:
                    scores *= np.float32(scale)
                scores += slots.shares.take(new, 0)
                fresh[new] = scores
                scores += slots.noise.take(new, 0)
                drafts[split:] = scores.argmax(1)
            work[slots.columns.take(changed)] = drafts
        return MadeRounds(tokens_read, is_kept, moved, fresh)

    def redraft(
        self, windows: list[RowWindow], scale: float, candidates: int, rounds: int, *, records: bool
    ) -> RowDrafts:
        """Write the drafts of rows into their `work`; `candidates` stale scores a slot are
        corrected.

        Candidates have the best scores; with `records`, which returns the scores of all slots
        drafted anew, they are the likeliest tokens, whatever the noise, and the best other one, not
        corrected.
        """
        listed = [_list_slots(window) for window in windows]
        old = [part[0] for part in listed]
        new = [part[1] for part in listed]
        each = np.arange(len(windows))
        rows = np.concatenate([each.repeat([*map(len, old)]), each.repeat([*map(len, new)])])
        at = np.concatenate([*old, *new])
        n_old = sum(map(len, old))
        if not len(at):
            return RowDrafts(rows, at, np.empty((0, 0), np.float32))

        # the windows' arrays as those of the list; behind the old slots of all rows come the new
        def gather(of_row: Callable[[RowWindow, np.ndarray], np.ndarray], parts: list[Any]) -> Any:
            arrays = [of_row(window, part) for window, part in zip(windows, parts)]
            return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

        seen = gather(lambda w, k: w.kept.seen.take(k + w.moved, 0), old)
        stale = gather(lambda w, k: w.kept.scores.take(k + w.moved, 0), old)  # [o, V]
        noise = gather(lambda w, k: w.noise.take(k, 0), old)
        perturbed = stale + noise
        n_corrected = min(candidates, stale.shape[1] - records)
        ids = largest(stale if records else perturbed, n_corrected)
        at_rows = np.arange(n_old)[:, None] * stale.shape[1]
        values = perturbed.take(ids + at_rows)
        if records:
            np.put(perturbed, ids + at_rows, _NEVER)
            others = perturbed.argmax(1)[:, None]
            values = np.append(values, perturbed.take(others + at_rows), 1)
            ids = np.append(ids, others, 1)

        base = self._find_base(windows, old, new)
        starts = np.cumsum([0, *(len(window.work) for window in windows)])
        columns = np.array([window.column for window in windows]) + starts[:-1]
        pairs = zip((*windows, *windows), (*old, *new))
        neighbours = np.concatenate([w.neighbours.take(k, 0) for w, k in pairs])
        slots = ListedSlots(
            columns[rows] + at,
            neighbours + starts[rows, None],
            seen,
            base,
            self.find_hidden(seen, base[:n_old]),
            ids,
            values,
            gather(lambda w, k: self._share(w, k, scale), new),
            gather(lambda w, k: w.noise.take(k, 0), new),
        )
        work = np.concatenate([window.work for window in windows])
        result = self.run(work, slots, scale, n_corrected, rounds)
        for window, start in zip(windows, starts.tolist()):
            window.work[:] = work[start : start + len(window.work)]

        drafted = (~result.is_kept).nonzero()[0]
        scores = np.empty((0, 0), np.float32)
        if records:
            places = ids[:, :n_corrected] + at_rows
            np.put(stale, places, stale.take(places) + result.moved[:, :n_corrected])
            scores = np.concatenate([stale, result.fresh]).take(drafted, 0)
        return RowDrafts(rows.take(drafted), at.take(drafted), scores)

    def _find_base(
        self, windows: list[RowWindow], old: list[np.ndarray], new: list[np.ndarray]
    ) -> np.ndarray:
        """`[n, H]`, see `SweepSlots.base`."""
        parts: list[list[np.ndarray]] = [[], []]
        for window, *of_window in zip(windows, old, new):
            # seen slots have states of their own, new ones that of the last slot of the pass
            begin = int(of_window[0][0]) if len(of_window[0]) else _count_seen(window)
            known = window.kept.prompt
            if self.slots is not None:
                first = min(begin + window.moved, window.width - 1)
                states = window.kept.states[first : window.width]
                known = known + (states @ self.slots.state).numpy()
            for k, bases in zip(of_window, parts):
                if self.slots is None:
                    bases.append(np.broadcast_to(known, (len(k), len(known))))
                    continue
                base = known.take(k - begin, 0, mode="clip")
                base += self.slots.slots.numpy().take(k + window.slot, 0, mode="clip")
                back = k - (_count_seen(window) - 1)  # below 1 where the state is the slot's own
                base += self.slots.distances.numpy().take(back, 0, mode="clip")
                bases.append(base)
        return np.concatenate([*parts[0], *parts[1]])

    def _share(self, window: RowWindow, new: np.ndarray, scale: float) -> np.ndarray:
        """`[n, V]`, the last slot's scores times the gates of new slots."""
        gates = np.zeros(len(new), np.float32)
        if self.slots is not None:
            back = new - _count_seen(window) + 1
            gates = self.slots.gates.numpy().take(back, mode="clip") * np.float32(scale)
        impossible = window.kept.last == _NEVER
        last = np.where(impossible, 0, window.kept.last)
        share: np.ndarray = gates[:, None] * last
        share[:, impossible] = _NEVER
        return share


def _count_seen(window: RowWindow) -> int:
    """How many of a window's drafts the last pass has seen, as if it were wide enough."""
    return window.width - window.moved


def _list_slots(window: RowWindow) -> tuple[np.ndarray, np.ndarray]:
    """Slots to draft: seen ones from the first with changed neighbours on, then new ones."""
    n_slots = len(window.neighbours)
    n_seen = min(_count_seen(window), n_slots)
    seen = window.kept.seen[window.moved : window.moved + n_seen]
    changed = (window.work.take(window.neighbours[:n_seen]) != seen).any(1)
    start = int(changed.argmax()) if changed.any() else n_seen
    old = np.arange(start, n_seen)
    new = np.arange(n_seen, n_slots)
    if window.is_fixed is None:
        return old, new
    return old[~window.is_fixed[old]], new[~window.is_fixed[new]]


def read_tokens(tokens: np.ndarray, n_ids: int) -> np.ndarray:
    """A row's tokens `[N]` int64 as rounds read them, `[N + 1]`: V for padding and at the end."""
    work = np.empty(len(tokens) + 1, np.int64)
    work[-1] = n_ids
    unsigned = np.uint64  # among which -1, padding, is the largest
    np.minimum(tokens.view(unsigned), unsigned(n_ids), out=work[:-1].view(unsigned))
    return work
