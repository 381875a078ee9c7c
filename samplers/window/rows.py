"""The rows of a window run: their tokens, the window over them, their counts, and where they end.

Prompts are right-aligned in the token buffer; a model's positions count from a row's own first
token (`RunRows.next_positions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.contracts import FinishedRow, Prompt
from mmaccel.kernels.accept_prefix import RowState, accept_prefix, count_pass
from mmaccel.kernels.window_inputs import WindowInputs, count_new_drafts, window_inputs
from mmaccel.results import Generation, OnStep, Progress, Stats
from mmaccel.samplers.checks import check_limit
from mmaccel.samplers.window.steps import StaticPart

if TYPE_CHECKING:
    from mmaccel.samplers.window.run import WindowRun

_OF_STATE = attrgetter(*RowState._fields)
_FILLER = 64  # slots of a pass over fillers, which may be wider than the window


class RunRows(StaticPart):
    """The B rows of a run, and which W slots of each the next pass covers.

    Tensors are int64 unless said otherwise; `static` ones keep their addresses in captured steps. A
    *column* is an index of the token buffer: slot i has column `origin + i` in every row.
    """

    static = (
        "tokens",
        "n_generated",
        "filled",
        "last_of_prompt",
        "lengths",
        "index",
        "stops",
        "limit",
        "ended",
        "n_new",
        "passes",
        "is_bad",
        "gains",
        "spent",
        "summary",
    )
    slots: Tensor  # [B, W], which the window covers
    fixed: Tensor | None = None  # [B, N] bool, columns of drafts that stay as they are
    _is_cut: Tensor | None = None  # [B], rows that `on_step` has ended since `take_cut`
    _inputs: WindowInputs | None = None  # of the next pass, where `write_drafts` made them

    def __init__(self, run: WindowRun, n_open: int) -> None:
        prompt = self.prompt = run.prompt
        self.length = run.length
        capacity = run.steps.capacity
        widest = run.chooser.widest
        n_each = run.runner.sync_every
        n_passes = (n_each + 1) * capacity.slots + n_each  # a retry for each, see `WindowRun`
        self.origin = capacity.origin  # column of slot 0
        self._n_free = capacity.slots + widest  # columns from slot 0 on
        self._backend = run.backend
        batch = prompt.batch
        self.tokens = self._align(prompt)  # [B, N], the token buffer: prompt, tokens, drafts
        self.last_of_prompt = _last_tokens(prompt)  # [R, 1], of every row of every branch
        self.lengths = prompt.lengths  # [R]
        self.stops = prompt.stop_tokens  # [S], after which a row ends; None for none
        new_zeros = self.tokens.new_zeros
        self.n_generated = new_zeros(batch)  # [B], tokens so far
        self.filled = self.n_generated + self.origin  # [B], first column that no pass has predicted
        self.index = torch.arange(max(widest, _FILLER), device=self.tokens.device)  # 0, 1, …
        self.limit = self.tokens.new_full((), run.length)  # slots wanted
        # batch slots behind the rows that are decoded are free
        self.ended = torch.arange(batch, device=self.tokens.device) >= n_open  # [B] bool
        self.n_new = new_zeros(batch)  # [B], tokens of the last pass
        self.passes = new_zeros(batch)  # [B], counted since a row began: they number the next one
        # [B] bool, rows that wanted a token of NaN or infinite scores
        self.is_bad = new_zeros(batch, dtype=torch.bool)
        self.gains = new_zeros(n_passes, batch)  # [P, B], tokens of each pass; P is never reached
        self.spent = new_zeros(batch, dtype=torch.float64)  # [B] float64, total variation
        # what the host reads after a pass: slots that the row which wants most still wants, rows
        # that have not ended, tokens of all rows, and whether any row is bad
        self.summary = new_zeros(4)

    def _align(self, prompt: Prompt) -> Tensor:
        """`[B, N]`: -1, then the conditional branch's prompt, then 0 from slot 0 on."""
        batch = prompt.batch
        shift = self.origin - prompt.lengths[:batch, None]
        index = torch.arange(self.origin, device=prompt.tokens.device)[None] - shift
        aligned = prompt.tokens[:batch].gather(1, index.clamp(min=0))
        aligned = torch.where(index >= 0, aligned, -1)
        return torch.cat([aligned, aligned.new_zeros(batch, self._n_free)], 1)

    def widen(self, n: int) -> None:
        """Let passes write up to `n` columns further behind the last slot."""
        self._n_free += n
        self.tokens = pad(self.tokens, (0, n))

    def restart(self, batch_slots: Tensor, prompt: Prompt) -> None:
        """Begin anew in some batch slots, `[n]` int64; `prompt` is that of all B of them."""
        self.prompt = prompt
        self.last_of_prompt.copy_(_last_tokens(prompt))
        self.lengths.copy_(prompt.lengths)
        self.tokens[batch_slots] = self._align(prompt)[batch_slots]
        self._empty(batch_slots)
        self.gains[:, batch_slots] = 0
        for counts in (self.ended, self.passes, self.is_bad, self.spent):
            counts[batch_slots] = 0

    def hold(self, batch_slots: Tensor, prompt: Prompt) -> None:
        """Let passes gain nothing in some batch slots, `[n]`, until `restart`; `prompt` is that of
        all B slots, of these up to the token where passes then write.
        """
        self.prompt = prompt
        self.lengths.copy_(prompt.lengths)
        self._empty(batch_slots)
        self.ended[batch_slots] = True

    def _empty(self, batch_slots: Tensor) -> None:
        self.n_generated[batch_slots] = 0
        self.filled[batch_slots] = self.origin
        if self.fixed is not None:
            self.fixed[batch_slots] = False

    def keep_rows(self, batch_slots: Tensor, prompt: Prompt) -> None:
        """Go on with these batch slots, `[n]` int64; `prompt` is theirs."""
        self.prompt = prompt
        self.last_of_prompt = _last_tokens(prompt)
        self.lengths = prompt.lengths
        self.gains = self.gains[:, batch_slots]
        for name in (
            "tokens",
            "n_generated",
            "filled",
            "ended",
            "n_new",
            "passes",
            "is_bad",
            "spent",
        ):
            setattr(self, name, getattr(self, name)[batch_slots])
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
        """From now on drafts of these slots of the window, `[B, W]` bool, stay as they are."""
        if self.fixed is None:
            self.fixed = torch.zeros_like(self.tokens, dtype=torch.bool)
        self.fixed.scatter_(1, self.columns, self.is_fixed() | is_fixed)

    def release(self, rows: Tensor) -> None:
        """Let all drafts of some rows change again, `[B]` bool."""
        if self.fixed is not None:
            self.fixed.masked_fill_(rows[:, None], False)

    def model_inputs(self, columns: Tensor, tokens: Tensor) -> Tensor:
        """What rows of all branches read at columns `[B, K]` of tokens `[B, N]`: `[R, K]`."""
        tokens = tokens.gather(1, columns)  # [B, K]; before slot 0 a branch's own last token
        last = self.last_of_prompt.view(self.prompt.branches, -1, 1)  # [G, B, 1]
        return torch.where(columns < self.origin, last, tokens).flatten(0, 1)

    def generated(self, length: int) -> Tensor:
        """A view of slots 0 … `length` - 1, `[B, length]` int64."""
        return self.tokens[:, self.origin : self.origin + length]

    def forced(self) -> Tensor | None:
        """`[B, W-1]`, what the layout demands of draft slots, or a fixed draft; -1, None: free."""
        layout = self.prompt.layout
        known = None if layout is None else layout.forced(self.slots[:, :-1])
        if self.fixed is None:
            return known
        held = self.tokens.gather(1, self.columns[:, :-1])
        stays = held.where(self.is_fixed()[:, :-1], -1)
        return stays if known is None else known.where(known >= 0, stays)

    def is_over(self, slots: Tensor) -> Tensor:
        """`[B, W]` bool: which of the slots nobody wants, as they lie behind a row's end."""
        return self.ended[:, None] | (slots >= self.limit)

    def write_drafts(self, new: Tensor, *, is_final: bool) -> Tensor:
        """As `WindowRun.write_drafts`; `is_final`: the next pass reads them as they are then."""
        inputs = self._read_inputs(new, self.forced())
        self._inputs = inputs if is_final else None
        assert inputs.drafts is not None
        return inputs.drafts

    def take_inputs(self) -> WindowInputs:
        inputs = self._inputs or self._read_inputs(None, None)
        self._inputs = None
        return inputs

    def _read_inputs(self, new: Tensor | None, forced: Tensor | None) -> WindowInputs:
        return self._backend.run(
            window_inputs,
            self.tokens,
            self.n_generated,
            self.filled,
            self.last_of_prompt,
            self.lengths,
            new,
            forced,
            origin=self.origin,
            width=self.slots.shape[1],
        )

    def n_new_drafts(self) -> int:
        """How many draft slots at the window's end some row may have no prediction for."""
        return self._backend.run(
            count_new_drafts,
            self.n_generated,
            self.filled,
            origin=self.origin,
            n_drafts=self.slots.shape[1] - 1,
        )

    def next_positions(self) -> Tensor:
        """`[R]` int64, the position at which the next pass of every row starts."""
        lengths = self.lengths.view(self.prompt.branches, -1)  # [G, B]
        return (lengths - 1 + self.n_generated).flatten()

    def first_positions(self) -> Tensor:
        """`[R]` int64, the position at which the pass that was accepted last has started."""
        return self.next_positions() - self.n_new.repeat(self.prompt.branches)

    def accept(
        self, tokens: Tensor, kept: Tensor, peak: Tensor, variation: Tensor | None, *, counts: bool
    ) -> None:
        """As `WindowRun.accept`, with the largest scores `peak` `[B, W]`; `counts` the pass."""
        self._backend.run(
            accept_prefix,
            tokens,
            kept,
            peak,
            variation,
            self._state(),
            self.limit,
            self.stops,
            origin=self.origin,
            counts=counts,
        )

    def count(self, variation: Tensor | None) -> None:
        """Count a pass in which rows gained `n_new`, and sum up what the host reads."""
        self._backend.run(count_pass, self._state(), variation, self.limit)

    def _state(self) -> RowState:
        return RowState(*_OF_STATE(self))

    def call_on_step(self, on_step: OnStep, passes: int, rows: tuple[int, ...]) -> None:
        """Report the last pass to `on_step`, and end rows where it says so."""
        tokens = self.generated(self.length)
        lengths = self.n_generated.clone()
        previous = lengths - self.n_new
        limit = on_step(Progress(tokens, lengths, previous, passes, rows))
        if limit is not None:
            limit = check_limit(limit, lengths)
            is_cut = limit <= lengths
            self._is_cut = is_cut if self._is_cut is None else self._is_cut | is_cut
            self.ended |= is_cut
            self.n_generated.copy_(torch.minimum(lengths, limit))
            # nothing behind a row's end is predicted: the pass may have begun behind it
            ends = self.origin + self.n_generated
            self.filled.copy_(ends.where(is_cut, self.filled))
        self.n_new.copy_((self.n_generated - previous).clamp(min=0))

    def take_cut(self) -> list[bool]:
        """Of each batch slot, whether `on_step` has ended its row since the last call of this."""
        cut = self._is_cut
        self._is_cut = None
        return [False] * len(self.ended) if cut is None else cut.tolist()

    def kept_gains(self, lengths: Tensor) -> Tensor:
        """`gains` without what lies behind lengths `[B]`: `on_step` may end a row before it."""
        gained = self.gains.cumsum(0).minimum(lengths)
        return gained.diff(dim=0, prepend=torch.zeros_like(gained[:1]))

    def finished_row(self, batch_slot: int, row: int) -> FinishedRow:
        """The result of row `row`, which is in a batch slot. Cost: some host synchronisations."""
        n_generated = int(self.n_generated[batch_slot])
        tokens = self.generated(n_generated)[batch_slot].clone()
        gained = self.kept_gains(self.n_generated)[:, batch_slot]
        gains = gained[gained > 0].tolist()
        variation = float(self.spent[batch_slot])
        return FinishedRow(row, tokens, len(gains), count_gains(gains), variation)

    def report(self, stats: Stats) -> Generation:
        """The tokens of all rows, 0 behind their ends; fills in the statistics."""
        lengths = self.n_generated.clone()
        index = torch.arange(self.length, device=lengths.device)[None]
        tokens = torch.where(index < lengths[:, None], self.generated(self.length), 0)
        gained = self.kept_gains(lengths)  # [passes, B]
        passes = (gained > 0).sum(0)
        stats.accepted = count_gains(gained[gained > 0].tolist())
        stats.row_passes = int(passes.sum())
        stats.tokens = int(gained.sum())
        stats.total_variation = float(self.spent.sum())
        return Generation(tokens, lengths, passes, stats)


def count_gains(gained: Sequence[int]) -> list[int]:
    """How often each number of tokens was gained, from 1 on: `Stats.accepted`."""
    counts = [0] * max(gained, default=0)
    for n in gained:
        counts[n - 1] += 1
    return counts


def _last_tokens(prompt: Prompt) -> Tensor:
    return prompt.tokens.gather(1, prompt.lengths[:, None] - 1)
