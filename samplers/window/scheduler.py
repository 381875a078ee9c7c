"""WindowScheduler: continuous batching of a window run.

Ended rows are reported, and the next ones prefilled alone in their batch slots. When no row waits,
batch slots of ended rows are dropped, unless steps are captured; where rows may join, some are
added. A row's tokens do not depend on its batch slot, all of whose state begins anew.

Where prompts come in chunks (`mmaccel.samplers.prompt_chunks`), a row is held until its prompt is
whole: passes gain it nothing, and write from its cursor on, where the next chunk overwrites it.
With a prefix tree the cursor begins behind what the tree holds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.capabilities import Option, explain
from mmaccel.contracts import (
    FinishedRow,
    Pass,
    Prompt,
    TokenModel,
)
from mmaccel.model_parts import PromptPiece, SelectedRows
from mmaccel.results import Stats
from mmaccel.samplers.arithmetic import as_called
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.prompt_chunks import Cursor, Part, PromptFeed
from mmaccel.samplers.scheduling import Scheduler, expand_rows, join_order
from mmaccel.samplers.window.prefix_reader import PrefixReader

if TYPE_CHECKING:
    from mmaccel.samplers.window.policy import WindowPolicy
    from mmaccel.samplers.window.run import WindowRun
    from mmaccel.samplers.window.step_runner import StepRunner


CHUNKS = Option("prefill_chunk_size", frozenset({"mixed passes"}))
"""Chunks beside windows as a part of a run."""


class WindowScheduler(Scheduler):
    """Assigns the rows of a prompt to the batch slots of a window run; see `Scheduler`."""

    def __init__(
        self,
        prompt: Prompt,
        noise: Noise,
        model: TokenModel,
        policy: WindowPolicy,
        runner: StepRunner,
    ) -> None:
        batching = prompt.batching
        assert batching is not None
        is_static = runner.is_static
        is_fixed = is_static or not isinstance(model, SelectedRows)
        super().__init__(prompt, batching, noise, is_fixed)
        self._reader: PrefixReader | None = None  # lets prompts begin with what a tree holds
        if batching.prefix_tree is not None:
            source = policy.draft_source()
            self._reader = PrefixReader(batching.prefix_tree, model, source, is_static=is_static)
        # rows that keep the logits behind their prompts begin together
        # tokens of prompts that a step processes at most; None: those of admitted rows
        self.chunk_size = None if model.takes_whole_prompts else model.setup.prefill_chunk_size
        # the prompts of the rows with which a run begins, too
        self.feeds_all = self.chunk_size is not None or self._reader is not None
        self._feed = PromptFeed(self.chunk_size)
        self._planned: list[Part] = []  # a chunk that the next pass processes, or the last one did
        self._apart = ""  # why chunks have passes of their own
        if self.chunk_size is not None:
            self._apart = "; ".join(each.short for each in explain(CHUNKS, policy, model))
        self._models: list[TokenModel] = []
        self._inputs: list[tuple[SelectedRows, Any]] = []  # of models that have such rows

    @property
    def n_decoding(self) -> int:
        """Batch slots whose row is unfinished and has its whole prompt in the cache."""
        return self.n_open - len(self._feed)

    def prompt(self) -> Prompt:
        """The prompts in the batch slots, up to the cursor's token where they are not whole."""
        whole = super().prompt()
        if not self._feed.cursors:
            return whole
        lengths = whole.lengths.clone()
        for batch_slot in self._held():
            cursor = self._feed.cursors[self.rows[batch_slot]]
            lengths[batch_slot :: len(self.rows)] = lengths.new_tensor(cursor.done) + 1
        return replace(whole, lengths=lengths)

    def register(self, model: TokenModel) -> None:
        """From now on the model's rows are those in the batch slots."""
        self._models.append(model)
        if isinstance(model, SelectedRows):
            self._inputs.append((model, model.get_row_inputs()))
        self._select_rows()

    def release_models(self) -> None:
        """Restore the row inputs that every registered model had before the run."""
        for model, inputs in self._inputs:
            model.select_rows(inputs, None)

    def finish(self, batch_slot: int, ended: FinishedRow) -> None:
        self._forget_prefix(batch_slot)
        super().finish(batch_slot, ended)

    def begin(self, run: WindowRun) -> None:
        """Process prompts of the rows with which a run begins until one is whole."""
        batch_slots = range(self.n_open)
        self._add_cursors(batch_slots)
        self._hold(run, batch_slots)
        self._go_on(run)
        run.passes.pieces = self._find_pieces()

    def refill(self, run: WindowRun) -> int:
        """Finish ended rows, admit others and process the next of prompts; how many rows begin."""
        self._keep_prompts()
        ended = run.rows.ended.tolist()
        is_cut = run.rows.take_cut()
        for batch_slot, is_open in enumerate(self.is_open):
            row = self.rows[batch_slot]
            if not is_open or not ended[batch_slot]:
                continue
            if row not in self._feed.cursors:
                self.finish(batch_slot, run.rows.finished_row(batch_slot, row))
            elif is_cut[batch_slot]:  # nobody waits for it any more
                del self._feed.cursors[row]
                nothing = run.rows.tokens.new_zeros(0)
                self.finish(batch_slot, FinishedRow(row, nothing, 0, [], 0.0))
        n_begun = self._go_on(run)
        is_smaller = 0 < self.n_open < len(self.rows) and not self.n_waiting
        if is_smaller and self._can_resize(run):
            self._keep(run, [k for k, is_open in enumerate(self.is_open) if is_open])
        run.passes.pieces = self._find_pieces()
        return n_begun

    def _go_on(self, run: WindowRun) -> int:
        """Admit rows and process their prompts, as long as no row decodes; how many begin to."""
        n_begun = 0
        while True:
            self._admit(run)
            n_begun += self._process(run)
            if self.n_decoding or not self._feed.cursors:
                return n_begun

    def _admit(self, run: WindowRun) -> None:
        """Admit rows that wait or join; in chunks one by one, while the next one has room."""
        most = None if self.chunk_size is None else 1
        while self._feed.has_room:
            if self.has_room:
                self._receive(run, most)
            free = [k for k, is_open in enumerate(self.is_open) if not is_open]
            filled = self.admit(free[:most])
            if not filled:
                return
            self._select_rows()
            self._add_cursors(filled)
            if self.chunk_size is None:
                return
            self._hold(run, filled)

    def _add_cursors(self, batch_slots: Sequence[int]) -> None:
        """Let prompts in some batch slots be processed after those that came before."""
        whole = self.whole.lengths.view(self.whole.branches, -1)
        tokens = self.whole.tokens.unflatten(0, whole.shape)  # [G, B, T], branch-major
        indices = self.indices()
        for batch_slot in batch_slots:
            index = indices[batch_slot]
            ends = (whole[:, index] - 1).tolist()
            self._forget_prefix(batch_slot)
            prompts: list[tuple[int, ...]] = []
            if self._reader is not None:
                pairs = zip(tokens[:, index].tolist(), ends, strict=True)
                prompts = [tuple(prompt[:end]) for prompt, end in pairs]
            self._feed.cursors[self.rows[batch_slot]] = Cursor(ends, prompts)

    def _forget_prefix(self, batch_slot: int) -> None:
        if self._reader is not None:
            for branch in range(self.whole.branches):
                self._reader.begin(batch_slot + branch * len(self.rows))

    def _held(self) -> list[int]:
        """The batch slots whose prompts are not whole."""
        return [
            batch_slot
            for batch_slot, row in enumerate(self.rows)
            if self.is_open[batch_slot] and row in self._feed.cursors
        ]

    def _hold(self, run: WindowRun, batch_slots: Sequence[int]) -> None:
        run.prompt = self.prompt()
        run.rows.hold(run.rows.tokens.new_tensor(list(batch_slots)), run.prompt)

    def _process(self, run: WindowRun) -> int:
        """Process the next tokens of prompts; how many rows begin, whose prompts are whole."""
        # the run's own model takes a chunk along with its next windows, others in a pass before
        mixes = self.chunk_size is not None and not self._apart
        while True:  # a chunk at a time; whole prompts until none waits for another one
            if self._reader is not None:
                self._reader.read(self._feed, self._find_row)
            self._planned = self._feed.plan()
            if not self._planned:
                break
            for model in self._models:
                if model is not run.model or not mixes:
                    self._prefill(run, model)
            self._feed.advance(self._planned)
            if mixes:
                break
            self._keep_prompts()
            if self.chunk_size is not None:
                break
        whole = self._feed.take_whole()
        begun = [k for k, row in enumerate(self.rows) if self.is_open[k] and row in whole]
        if begun:
            batch_slots = run.rows.tokens.new_tensor(begun)
            run.prompt = self.prompt()
            run.rows.restart(batch_slots, run.prompt)
            run.noise.refill(self.noise())
            run.pass_noise.forget()
            run.drafter.begin_rows(run, batch_slots)
        held = self._held()
        if held:
            self._hold(run, held)
        if not self.n_decoding:  # there is no window to go with
            self._prefill(run, run.model)
            self._keep_prompts()
        return len(begun)

    def _keep_prompts(self) -> None:
        """Leave prompts in the tree that are whole now that the planned chunk was processed."""
        if self._reader is not None:
            self._reader.keep(self._planned, self._find_row)
        self._planned = []

    def _find_pieces(self) -> list[PromptPiece]:
        if not self._planned:
            return []
        tokens = super().prompt().tokens.clamp(min=0)
        pieces = []
        for part in self._planned:
            row = self._find_row(part.row, part.branch)
            prompt_tokens = tokens[row, part.start : part.start + part.n]
            pieces.append(PromptPiece(row, part.start, prompt_tokens))
        return pieces

    def report(self, stats: Stats, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Fill in statistics; of all rows tokens `[B, length]`, lengths and passes `[B]`, int64."""
        totals = self.totals
        stats.accepted = totals.accepted
        stats.tokens = totals.tokens
        stats.row_passes = totals.row_passes
        stats.total_variation = totals.total_variation
        if self._reader is not None:
            self._reader.describe(stats)
        if self._apart:
            stats.notes.append(f"prefill_chunk_size: chunks had passes of their own: {self._apart}")
        ended = [self.ended[row] for row in range(len(self.ended))]
        tokens = self.whole.tokens.new_zeros(len(ended), length)
        for row_tokens, row in zip(tokens, ended):
            row_tokens[: row.tokens.shape[0]] = row.tokens
        lengths = [row.tokens.shape[0] for row in ended]
        passes = [row.passes for row in ended]
        return tokens, tokens.new_tensor(lengths), tokens.new_tensor(passes)

    def _receive(self, run: WindowRun, at_once: int | None) -> None:
        """Let rows join in new batch slots, `at_once` at most; None: while there is room."""
        can_resize = self._can_resize(run)
        n_slots = len(self.rows)
        most = (self._max_num_seqs if can_resize else n_slots) - self.n_open
        if at_once is not None:
            most = min(most, at_once)
        before = [model.get_row_inputs() for model, _ in self._inputs]
        places = expand_rows(
            self.indices(), self.whole.batch, self.whole.branches, self.whole.tokens.device
        )
        arrived = self.receive(most) if most else None
        if arrived is None:
            return
        order = join_order(n_slots, arrived.prompt.batch, self.whole.branches, places.device)
        for k, (model, inputs) in enumerate(self._inputs):
            joined = model.join_rows(inputs, model.get_row_inputs(), places, order)
            model.select_rows(before[k], None)  # captured steps read these very tensors
            self._inputs[k] = model, joined
        n_more = self.n_waiting - (n_slots - self.n_open)
        if n_more > 0:  # new batch slots begin as copies of the first
            self._keep(run, [*range(n_slots), *[0] * n_more])

    def _find_row(self, row: int, branch: int) -> int:
        """The row of a pass that a branch of an unfinished row is."""
        slots = [k for k, each in enumerate(self.rows) if each == row and self.is_open[k]]
        return slots[0] + branch * len(self.rows)  # branch-major

    @as_called()
    def _prefill(self, run: WindowRun, model: TokenModel) -> None:
        """Process the planned chunk in passes of its own: one for each number of tokens, or, of
        models that process all rows at once, one whose surplus is overwritten.
        """
        tokens = super().prompt().tokens.clamp(min=0)
        widths = sorted({part.n for part in self._planned})
        takes_rows = isinstance(model, SelectedRows)
        for width in widths if takes_rows else widths[-1:]:
            began = time.perf_counter()
            parts = [part for part in self._planned if part.n == width or not takes_rows]
            places = sorted((self._find_row(part.row, part.branch), part.start) for part in parts)
            rows, start = torch.tensor(places, device=tokens.device, dtype=torch.int64).unbind(1)
            if len({start for _, start in places}) == 1:  # one number expanded: one mask for all
                start = start[:1].expand_as(start)
            index = torch.arange(width, device=tokens.device)
            if isinstance(model, SelectedRows):
                at = (start[:, None] + index).clamp(max=tokens.shape[1] - 1)
                model.prefill_rows(tokens[rows].gather(1, at), start, rows)
            else:
                # the other rows process tokens where their next pass begins, which overwrites them
                begins = run.rows.next_positions().index_copy(0, rows, start)
                first = torch.zeros_like(begins).index_copy(0, rows, start)
                at = (first[:, None] + index).clamp(max=tokens.shape[1] - 1)
                model.prefill(Pass(tokens.gather(1, at), begins))
            if model is run.model:
                run.stats.forward_seconds += time.perf_counter() - began
                run.stats.prefill_passes += 1
                run.stats.tokens_processed += at.numel()
            else:
                run.stats.draft_passes += 1

    def _can_resize(self, run: WindowRun) -> bool:
        return not run.runner.is_static and len(self._inputs) == len(self._models)

    def _keep(self, run: WindowRun, batch_slots: list[int]) -> None:
        """Go on with these batch slots; one that stands there again is a free one."""
        device = run.rows.tokens.device
        batch = run.prompt.batch
        self.rows = [self.rows[k] for k in batch_slots]
        self.is_open = [
            self.is_open[k] and k not in batch_slots[:n] for n, k in enumerate(batch_slots)
        ]
        kept = torch.tensor(batch_slots, device=device, dtype=torch.int64)
        run.prompt = self.prompt()
        run.rows.keep_rows(kept, run.prompt)
        run.noise = run.noise.rows(kept)
        run.pass_noise.forget()
        run.steps.keep_rows(kept)
        rows = expand_rows(batch_slots, batch, run.prompt.branches, device)
        for model, _ in self._inputs:
            model.keep_rows(rows)
        self._select_rows()

    def _select_rows(self) -> None:
        whole = self.whole
        rows = expand_rows(self.indices(), whole.batch, whole.branches, whole.tokens.device)
        for model, inputs in self._inputs:
            model.select_rows(inputs, rows)
