"""WindowRun: the loop of window decoding.

A step drafts a window of W tokens, runs one forward pass of the model over it, and accepts the
prefix that the policy finds right. The loop knows rows, stop tokens and counts, and nothing about
probability; policies know probability and nothing about positions. A step of greedy Jacobi
decoding:

    drafts = run.write_drafts(run.propose().tokens)  # [B, W-1]
    scores = run.forward()                           # [B, W, V], slot i after drafts 0 … i-1
    tokens = scores.argmax(-1)                       # [B, W]
    run.accept(tokens, tokens[:, :-1] == drafts)

A step works on tensors that keep their addresses and reads nothing back, so that it may be captured
as a CUDA graph (`steps.py`). After one or more steps the host synchronises once (`sync`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from torch import Tensor

from mmaccel.results import Generation
from mmaccel.samplers.checks import invalid_logits
from mmaccel.samplers.drafting.contract import Drafts, PassPath, check_proposed
from mmaccel.samplers.drafting.copying import last_known
from mmaccel.samplers.window.parts import RunParts
from mmaccel.samplers.window.step_runner import Once
from mmaccel.samplers.window.window_size import note_lost_width


class WindowRun(RunParts):
    """One decoding run, made by `WindowPolicy.sample`; its parts are opened in `parts.py`.

    A policy hands its step to `run`. A step calls, in this order: `propose` and `write_drafts` (if
    it drafts), `forward`, `observe` (if it drafts), `accept`. A policy whose steps cannot be
    captured calls these itself while `width` is not 0, followed by `sync`, and in the end `finish`.
    """

    width: int  # W of the next pass; 0 once every row has ended
    is_retry = False  # whether the next pass repeats one that an invalid draft may have spoiled
    _is_narrowed = False  # whether the drafter chose a narrower pass than the chooser

    def begin(self) -> None:
        """Process the prompt, and choose the first window."""
        self.passes.begin(self)
        self._begin_step(self.length)

    def run(self, step_fn: Callable[[], None]) -> Generation:
        """Repeat a step until every row has ended."""
        while self.width:
            self.run_step(step_fn)
        return self.finish()

    def run_step(self, step_fn: Callable[[], None]) -> None:
        """Carry out a step, or as many as lie between two synchronisations with the host."""
        is_first = self.stats.passes == 0  # no pass before it to draft from
        has_pieces = bool(self.passes.pieces)  # of prompts of rows that wait
        is_alone = is_first or self.is_retry or has_pieces or self.on_step is not None
        n_passes = 1 if is_alone else self.runner.sync_every
        # steps with one key are the same work on the same tensors: once captured they are replayed
        key: Hashable | None = self.width
        if is_first:  # logits of the prompt are no pass's own tensors
            key = None if self.passes.knows_first else Once("first pass", self.width)
        if self.is_retry or has_pieces:
            key = None
        moves_here = self.runner.is_static or n_passes > 1  # otherwise `_begin_step` has done it

        def step() -> None:
            if is_first:
                self.steps.names.clear()
            if moves_here:
                self.rows.move_window(self.width)
            step_fn()

        n_behind = self.steps.buffers.n_behind
        self.passes.n_behind = n_behind.get(key, 0)  # a replayed pass does not count them
        is_usual = self.steps.run(step, key, n_passes, self.width)
        n_behind[key] = self.passes.n_behind
        self.sync(n_passes, is_usual and not has_pieces)

    # ---- what a step calls, in this order

    def propose(self) -> Drafts:
        """What the drafter proposes for draft slots `[B, W-1]`: tokens, or scores to draw from."""
        source = self.drafter.source
        if not source.keeps_predictions:
            self.rows.forget_drafts()
        if self.is_retry:  # copies of each row's last token
            return Drafts(last_known(self.frontier()))
        drafts = self.drafter.propose(self)
        if self.width > 1:
            shape = (len(self.rows.tokens), self.width - 1, self.vocab_size)
            refuses_nan = not self.policy.freezes_noise or self.stats.passes == 0
            check_proposed(source, drafts, shape, refuses_nan)
        return drafts

    def write_drafts(self, new: Tensor) -> Tensor:
        """Write `new` `[B, W-1]` where nothing was predicted, and forced tokens; what is read."""
        return self.rows.write_drafts(new, is_final=not self.drafter.source.corrects)

    def forward(self) -> Tensor:
        """One forward pass: scores `[B, W, V]` float32, whose softmax is the target distribution of
        each slot after guidance, temperature and filters (`SamplingParams.apply`).
        """
        return self.passes.forward()

    def observe(self, noise: Tensor | None) -> None:
        """Show the drafter what the pass said, and the window's frozen noise where there is one."""
        scores = self.passes.observed()
        if scores is not None:
            self.drafter.observe(self, scores, noise)

    def accept(self, tokens: Tensor, kept: Tensor, variation: Tensor | None = None) -> None:
        """Generate each row's tokens up to its first wrong draft; the rest are drafts.

        Args:
            tokens: `[B, W]` int64, the window's new contents.
            kept: `[B, W-1]` bool, right drafts; after n leading ones n + 1 tokens are generated,
                the last in place of a wrong draft.
            variation: `[B, W-1]`, total variation spent on draft slots; accepted ones are charged.
        """
        if variation is not None:
            self._variation.hold(variation)
        rows = self.rows
        recording = self.passes.recording
        before = None if recording is None else rows.n_generated.clone()
        counts = self.on_step is None  # which may end rows, so that `sync` counts
        rows.accept(tokens, kept, self.passes.peak, self._variation.value, counts=counts)
        if recording is not None and before is not None:
            recording.accept(before, rows.n_new)
        self.drafter.accepted(self, rows.n_new)

    def accept_path(self, path: PassPath, tokens: Tensor, kept: Tensor) -> None:
        """As `accept`, after a pass over a tree of which `path` stands for the window."""
        self.accept(tokens, kept)
        self.passes.commit(path.entries)

    # ---- between two steps

    def sync(self, n_passes: int = 1, is_usual: bool = True) -> None:
        """Read what the last passes generated, refill the batch and begin the next step. `is_usual`
        is False of passes that took longer than others like them will, as captures do.

        Raises:
            NumericsError: the next token of a row has invalid logits, whatever the drafts.
        """
        rows = self.rows
        stats = self.stats
        scheduler = self.scheduler
        n_entries = self.width * len(rows.lengths) + self.passes.n_behind
        if self.passes.knows_first and self.width == 1 and not stats.passes:
            stats.prefill_passes -= 1  # the prompt's pass gives the first tokens
            n_entries = 0
        stats.passes += n_passes
        stats.tokens_processed += n_passes * n_entries
        if self.on_step is not None:
            numbers = () if scheduler is None else tuple(scheduler.rows)
            rows.call_on_step(self.on_step, stats.passes, numbers)
            rows.count(self._variation.value)
        remaining, n_open, n_tokens, is_bad = rows.summary.tolist()  # the only synchronisation
        if is_bad:
            self._retry()
            return
        is_usual = is_usual and not self.is_retry and not self._is_narrowed
        seconds = self.chooser.end(n_passes, n_tokens, is_usual=is_usual)
        self.drafter.timed(self, seconds)
        if scheduler is not None and (n_open < scheduler.n_open or scheduler.has_room):
            if scheduler.refill(self):
                remaining = self.length
            n_open = scheduler.n_decoding
            n_tokens = int(rows.n_generated.sum())
        self.chooser.go_on(n_open, n_tokens)
        self.is_retry = False
        self._begin_step(remaining)

    def _begin_step(self, remaining: int) -> None:
        """Choose the next window; `remaining` slots are wanted by the row that wants most."""
        chosen = self.chooser.begin(remaining)
        self.width = self.drafter.choose_width(self, chosen) if chosen else 0
        self._is_narrowed = self.width < chosen
        if not self.runner.is_static:
            self.rows.move_window(self.width)

    def _retry(self) -> None:
        """Repeat the last pass once, as an invalid draft may have spoiled it: attention multiplies
        values that a mask hides by 0, which leaves NaN. Copies of each row's last token overwrite
        the drafts; a row is really invalid if that changes nothing.
        """
        rows = self.rows
        is_bad = rows.is_bad & ~rows.ended
        is_final = self.is_retry or self.width == 1  # a repetition itself, or without drafts
        if not is_final and self.passes.knows_first:  # the model itself processed what is before
            is_final = bool((is_bad & (rows.n_generated == 0)).any())
        if is_final:
            numbers = range(len(is_bad)) if self.scheduler is None else self.scheduler.rows
            pairs = zip(numbers, is_bad.tolist())
            raise invalid_logits(tuple(row for row, is_invalid in pairs if is_invalid))
        self.is_retry = True
        rows.release(is_bad)
        rows.is_bad.zero_()
        rows.forget_drafts()
        self.chooser.begin_again()
        if not self.runner.is_static:
            rows.move_window(self.width)

    def finish(self) -> Generation:
        """The result, once `width` is 0."""
        stats = self.stats
        if self.scheduler is None:
            generation = self.rows.report(stats)
        else:
            generation = Generation(*self.scheduler.report(stats, self.length), stats)
        self.steps.describe(stats, self.passes.formats.name, self.model.route.same_bits)
        self.passes.describe()
        recorder = self.model.setup.recorder
        if recorder is not None:
            recorder.finish(self)
        note_lost_width(self)
        stats.seconds = time.perf_counter() - self.began
        self.runner.finish()
        self.drafter.close(self)
        if self.scheduler is not None:
            self.scheduler.release_models()
        return generation
