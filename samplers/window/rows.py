"""The rows of a window run: their tokens, the window over them, their counts, and where they end.

All of it is in tensors that a step updates in place, so that steps may be captured. The prompts in
the token buffer are right-aligned, so that slot i of every row has the same column. A model's
positions count from the row's own first token instead; see `RunRows.next_positions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.contracts import FinishedRow, Prompt
from mmaccel.kernels.accept_prefix import RowState, accept_prefix, count_pass
from mmaccel.kernels.dispatch import Backend
from mmaccel.kernels.window_inputs import WindowInputs, count_new_drafts, window_inputs
from mmaccel.results import Generation, OnStep, Progress, Stats
from mmaccel.samplers.checks import check_limit
from mmaccel.samplers.window.step_state import StaticPart

_FILLER = 64  # slots of a pass over fillers, which may be wider than the window
_STEP = 64  # capacities are rounded up to it, so that prompts of many lengths share graphs


class Capacity(NamedTuple):
    """Size of a run: columns before slot 0, slots, and positions of the model's cache."""

    origin: int
    slots: int
    positions: int


def measure(
    prompt: Prompt, length: int, *, rounded: bool = False, most: int | None = None
) -> Capacity:
    """The capacity that a run needs.

    Args:
        prompt: what stands before slot 0.
        length: slots wanted.
        rounded: round up, so that other prompts and lengths fit too.
        most: the model's positions, if known. Rounding never goes beyond them.
    """
    origin = prompt.tokens.shape[1]
    needed = prompt.tokens.shape[1] + length - 1
    if not rounded:
        return Capacity(origin, length, needed)  # the last token is never processed
    origin, slots = (-(-n // _STEP) * _STEP for n in (origin, length))
    positions = origin + slots - 1
    return Capacity(origin, slots, positions if most is None else max(needed, min(positions, most)))


class TokenBuffer(StaticPart):
    """The tokens of every row, and which W slots of each row the next pass covers.

    Args:
        prompt: what stands before slot 0.
        capacity: from `measure`.
        widest: the largest W there will be.

    Attributes:
        tokens: `[B, N]` int64, prompt (left-padded with -1), generated tokens, drafts.
        origin: column of slot 0 in `tokens`.
        n_generated: `[B]` int64, tokens generated so far.
        filled: `[B]` int64, first column that no pass has predicted.
        last_of_prompt: `[R, 1]` int64, the last prompt token of every row of every branch.
        index: `[N]` int64, the numbers from 0 on.
        slots: `[B, W]` int64, the slots that the window covers.
        fixed: `[B, N]` bool, columns of drafts that stay as they are; None where none ever do.
    """

    static = ("tokens", "n_generated", "filled", "last_of_prompt", "index")
    fixed: Tensor | None = None

    def __init__(self, prompt: Prompt, capacity: Capacity, widest: int) -> None:
        self.origin = capacity.origin
        self._branches = prompt.branches
        self._n_free = capacity.slots + widest  # columns from slot 0 on
        self.tokens = self._align(prompt)
        self.n_generated = prompt.tokens.new_zeros(prompt.batch)
        self.filled = self.n_generated + self.origin
        self.last_of_prompt = _last_tokens(prompt)
        self.index = torch.arange(max(widest, _FILLER), device=self.tokens.device)

    def _align(self, prompt: Prompt) -> Tensor:
        """`[B, N]` int64: -1, then the conditional branch's prompt, then 0 from slot 0 on."""
        batch = prompt.batch
        shift = self.origin - prompt.lengths[:batch, None]
        index = torch.arange(self.origin, device=prompt.tokens.device)[None] - shift
        aligned = prompt.tokens[:batch].gather(1, index.clamp(min=0))
        aligned = torch.where(index >= 0, aligned, -1)
        return torch.cat([aligned, aligned.new_zeros(batch, self._n_free)], 1)

    def restart(self, batch_slots: Tensor, prompt: Prompt) -> None:
        """Begin anew in some batch slots, `[n]` int64; `prompt` is that of all B of them."""
        self.last_of_prompt.copy_(_last_tokens(prompt))
        self.tokens[batch_slots] = self._align(prompt)[batch_slots]
        self.empty(batch_slots)

    def empty(self, batch_slots: Tensor) -> None:
        """Forget what was generated and drafted in some batch slots, `[n]` int64."""
        self.n_generated[batch_slots] = 0
        self.filled[batch_slots] = self.origin
        if self.fixed is not None:
            self.fixed[batch_slots] = False

    def keep_rows(self, batch_slots: Tensor, prompt: Prompt) -> None:
        """Go on with some batch slots alone, `[n]` int64; `prompt` is theirs."""
        self.last_of_prompt = _last_tokens(prompt)
        self.tokens, self.filled = self.tokens[batch_slots], self.filled[batch_slots]
        self.n_generated = self.n_generated[batch_slots]
        if self.fixed is not None:
            self.fixed = self.fixed[batch_slots]

    def move_window(self, width: int) -> None:
        """Cover the next `width` slots of every row."""
        self.slots = self.n_generated[:, None] + self.index[:width]  # [B, W]

    @property
    def columns(self) -> Tensor:
        """`[B, W]` int64, the columns of the window's slots in `tokens`."""
        return self.slots + self.origin

    def is_predicted(self) -> Tensor:
        """`[B, W-1]` bool: the draft slots for which the last pass predicted a token."""
        return self.columns[:, :-1] < self.filled[:, None]

    def forget_drafts(self) -> None:
        """Treat no prediction of the last pass as a draft."""
        self.filled.copy_(self.origin + self.n_generated)

    def is_fixed(self) -> Tensor:
        """`[B, W]` bool: the window's slots whose drafts stay as they are."""
        if self.fixed is None:
            return torch.zeros_like(self.slots, dtype=torch.bool)
        return self.fixed.gather(1, self.columns)

    def fix(self, is_fixed: Tensor) -> None:
        """From the next pass on, drafts of some of the window's slots stay as they are.

        Args:
            is_fixed: `[B, W]` bool, these slots; others are as they were.
        """
        if self.fixed is None:
            self.fixed = torch.zeros_like(self.tokens, dtype=torch.bool)
        self.fixed.scatter_(1, self.columns, self.is_fixed() | is_fixed)

    def release(self, rows: Tensor) -> None:
        """Let all drafts of some rows change again, `[B]` bool."""
        if self.fixed is not None:
            self.fixed.masked_fill_(rows[:, None], False)

    def model_inputs(self, columns: Tensor, tokens: Tensor) -> Tensor:
        """What the rows of all branches read at some columns, `[R, K]`.

        Before slot 0 every branch gets the last token of its own prompt.

        Args:
            columns: `[B, K]` int64.
            tokens: `[B, N]` int64, the token buffer, or a copy with other drafts.
        """
        tokens = tokens.gather(1, columns)  # [B, K]
        last = self.last_of_prompt.view(self._branches, -1, 1)  # [G, B, 1]
        return torch.where(columns < self.origin, last, tokens).flatten(0, 1)

    def generated(self, length: int) -> Tensor:
        """A view of slots 0 … `length` - 1, `[B, length]` int64."""
        return self.tokens[:, self.origin : self.origin + length]


def _last_tokens(prompt: Prompt) -> Tensor:
    return prompt.tokens.gather(1, prompt.lengths[:, None] - 1)


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

    def kept(self, lengths: Tensor) -> Tensor:
        """`gains` of the tokens that rows ended with, `[B]` int64: `on_step` may end a row before
        what earlier passes made.
        """
        made = self.gains.cumsum(0).minimum(lengths)
        return made.diff(dim=0, prepend=torch.zeros_like(made[:1]))

    def report(self, stats: Stats, lengths: Tensor) -> Tensor:
        """Fill in statistics; returns `[B]` int64, the passes in which each row gained tokens.

        Args:
            lengths: `[B]` int64, tokens of each row.
        """
        gained = self.kept(lengths)  # [passes, B]
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


class RunRows(StaticPart):
    """The B rows of a run.

    Args:
        prompt: of the rows.
        length: slots wanted of each.
        capacity: of the buffers.
        widest: the widest window there will be.
        n_passes: more passes than those in which a row can gain tokens.
        n_open: rows that are decoded; further batch slots are free.
        backend: carries out what a pass does to the rows.

    Attributes:
        prompt: of the rows that are decoded now.
        buffer: the tokens of all rows and the window over them.
        counters: counted so far; `counters.passes` numbers the next pass.
        lengths: `[R]` int64, of the prompts.
        stops: `[S]` int64, tokens after which a row ends; None for none.
        limit: `[]` int64, slots wanted.
        ended: `[B]` bool.
        n_new: `[B]` int64, tokens of the last pass.
        summary: `[4]` int64, what the host reads after a pass: slots that the row which wants most
            still wants, rows that have not ended, tokens of all rows, and whether a row wanted a
            token of NaN or infinite scores.
    """

    static = ("lengths", "stops", "limit", "ended", "n_new", "summary")
    _is_cut: Tensor | None = None  # [B], rows that `on_step` has ended since `take_cut`
    _inputs: WindowInputs | None = None  # of the next pass, where `write_drafts` made them

    def __init__(
        self,
        prompt: Prompt,
        length: int,
        capacity: Capacity,
        *,
        widest: int,
        n_passes: int,
        n_open: int,
        backend: Backend,
    ) -> None:
        self.prompt = prompt
        self.length = length
        self.buffer = TokenBuffer(prompt, capacity, widest)
        n_generated = self.buffer.n_generated
        self.counters = RunCounters(prompt.batch, n_passes, n_generated.device)
        self.lengths = prompt.lengths
        self.stops = prompt.stop_tokens
        self.limit = n_generated.new_full((), length)
        self.ended = torch.arange(prompt.batch, device=n_generated.device) >= n_open
        self.n_new = torch.zeros_like(n_generated)
        self.summary = n_generated.new_zeros(4)
        self._backend = backend

    def forced(self) -> Tensor | None:
        """What each draft slot must hold, `[B, W-1]` int64, -1 where it is free; None if all are.

        The layout demands it, or the draft is `TokenBuffer.fixed`.
        """
        layout = self.prompt.layout
        buffer = self.buffer
        known = None if layout is None else layout.forced(buffer.slots[:, :-1])
        if buffer.fixed is None:
            return known
        held = buffer.tokens.gather(1, buffer.columns[:, :-1])
        stays = held.where(buffer.is_fixed()[:, :-1], -1)
        return stays if known is None else known.where(known >= 0, stays)

    def is_over(self, slots: Tensor) -> Tensor:
        """`[B, W]` bool: which of the slots nobody wants, as they lie behind a row's end."""
        return self.ended[:, None] | (slots >= self.limit)

    def write_drafts(self, new: Tensor, *, is_final: bool) -> Tensor:
        """Write drafts where the last pass predicted nothing, and forced tokens.

        Args:
            new: `[B, W-1]` int64.
            is_final: whether the next pass reads them as they are then.

        Returns:
            `[B, W-1]` int64, the window's drafts.
        """
        found = self._read_inputs(new, self.forced())
        self._inputs = found if is_final else None
        assert found.drafts is not None
        return found.drafts

    def take_inputs(self) -> WindowInputs:
        """What the next pass reads."""
        found = self._inputs or self._read_inputs(None, None)
        self._inputs = None
        return found

    def _read_inputs(self, new: Tensor | None, forced: Tensor | None) -> WindowInputs:
        buffer = self.buffer
        return self._backend.run(
            window_inputs,
            buffer.tokens,
            buffer.n_generated,
            buffer.filled,
            buffer.last_of_prompt,
            self.lengths,
            new,
            forced,
            origin=buffer.origin,
            width=buffer.slots.shape[1],
        )

    def n_new_drafts(self) -> int:
        """How many draft slots at the window's end some row may have no prediction for."""
        buffer = self.buffer
        return self._backend.run(
            count_new_drafts,
            buffer.n_generated,
            buffer.filled,
            origin=buffer.origin,
            n_drafts=buffer.slots.shape[1] - 1,
        )

    def next_positions(self) -> Tensor:
        """`[R]` int64, the position at which the next pass of every row starts."""
        lengths = self.lengths.view(self.prompt.branches, -1)  # [G, B]
        return (lengths - 1 + self.buffer.n_generated).flatten()

    def first_positions(self) -> Tensor:
        """`[R]` int64, the position at which the pass that was accepted last has started."""
        return self.next_positions() - self.n_new.repeat(self.prompt.branches)

    def accept(
        self, tokens: Tensor, kept: Tensor, peak: Tensor, variation: Tensor | None, *, counts: bool
    ) -> None:
        """Generate each row's tokens up to its first wrong draft; the rest are drafts.

        Args:
            tokens: `[B, W]` int64, the window's new contents.
            kept: `[B, W-1]` bool, which drafts were right.
            peak: `[B, W]`, the largest score of every slot.
            variation: `[B, W-1]`, see `mmaccel.kernels.accept_prefix.accept_prefix`.
            counts: count the pass too; see `count`.
        """
        self._backend.run(
            accept_prefix,
            tokens,
            kept,
            peak,
            variation,
            self._state(),
            self.limit,
            self.stops,
            origin=self.buffer.origin,
            counts=counts,
        )

    def count(self, variation: Tensor | None) -> None:
        """Count a pass in which rows gained `n_new` tokens, and sum up what the host reads."""
        self._backend.run(count_pass, self._state(), variation, self.limit)

    def _state(self) -> RowState:
        buffer = self.buffer
        counters = self.counters
        return RowState(
            buffer.tokens,
            buffer.n_generated,
            buffer.filled,
            self.ended,
            self.n_new,
            counters.is_bad,
            counters.passes,
            counters.gains,
            counters.spent,
            self.summary,
        )

    def call_on_step(self, on_step: OnStep, passes: int, rows: tuple[int, ...]) -> None:
        """Report the last pass to `on_step`, and end rows where it says so.

        Args:
            passes: so far.
            rows: the row in each batch slot; empty without continuous batching.
        """
        buffer = self.buffer
        tokens = buffer.generated(self.length)
        lengths = buffer.n_generated.clone()
        previous = lengths - self.n_new
        limit = on_step(Progress(tokens, lengths, previous, passes, rows))
        if limit is not None:
            limit = check_limit(limit, lengths)
            is_cut = limit <= lengths
            self._is_cut = is_cut if self._is_cut is None else self._is_cut | is_cut
            self.ended |= is_cut
            buffer.n_generated.copy_(torch.minimum(lengths, limit))
            # nothing behind a row's end is predicted: the pass may have begun behind it
            ends = buffer.origin + buffer.n_generated
            buffer.filled.copy_(ends.where(is_cut, buffer.filled))
        self.n_new.copy_((buffer.n_generated - previous).clamp(min=0))

    def take_cut(self) -> list[bool]:
        """Of each batch slot, whether `on_step` has ended its row since the last call of this."""
        found = self._is_cut
        self._is_cut = None
        return [False] * len(self.ended) if found is None else found.tolist()

    def bad_rows(self) -> Tensor:
        """`[B]` bool, rows that have not ended and wanted a token of invalid scores."""
        return self.counters.is_bad & ~self.ended

    def finished_row(self, batch_slot: int, row: int) -> FinishedRow:
        """The result of row `row`, which is in a batch slot. Cost: some host synchronisations."""
        n_generated = int(self.buffer.n_generated[batch_slot])
        tokens = self.buffer.generated(n_generated)[batch_slot].clone()
        gained = self.counters.kept(self.buffer.n_generated)[:, batch_slot]
        gains = gained[gained > 0].tolist()
        variation = float(self.counters.spent[batch_slot])
        return FinishedRow(row, tokens, len(gains), count_gains(gains), variation)

    def restart(self, batch_slots: Tensor, prompt: Prompt) -> None:
        """Begin anew in some batch slots, `[n]` int64; `prompt` is that of all B of them."""
        self.prompt = prompt
        self.buffer.restart(batch_slots, prompt)
        self.lengths.copy_(prompt.lengths)
        self.ended[batch_slots] = False
        self.counters.restart(batch_slots)

    def hold(self, batch_slots: Tensor, prompt: Prompt) -> None:
        """Let passes gain nothing in some batch slots, `[n]` int64, whose prompts are not whole.

        What passes write there begins behind the tokens that are in the cache.

        Args:
            batch_slots: see above; `restart` ends it.
            prompt: of all B of them; where rows are held, up to the next token to be processed.
        """
        self.prompt = prompt
        self.lengths.copy_(prompt.lengths)
        self.buffer.empty(batch_slots)
        self.ended[batch_slots] = True

    def keep_rows(self, batch_slots: Tensor, prompt: Prompt) -> None:
        """Go on with these batch slots, `[n]` int64; `prompt` is theirs."""
        self.prompt = prompt
        self.buffer.keep_rows(batch_slots, prompt)
        self.lengths = prompt.lengths
        self.ended = self.ended[batch_slots]
        self.n_new = self.n_new[batch_slots]
        self.counters.keep_rows(batch_slots)

    def report(self, stats: Stats) -> Generation:
        """The tokens of all rows, 0 behind their ends; fills in the statistics."""
        lengths = self.buffer.n_generated.clone()
        index = torch.arange(self.length, device=lengths.device)[None]
        tokens = torch.where(index < lengths[:, None], self.buffer.generated(self.length), 0)
        return Generation(tokens, lengths, self.counters.report(stats, lengths), stats)
