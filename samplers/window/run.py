"""WindowRun: the loop of window decoding.

A step drafts the window, runs one forward pass of the model over it, and accepts a prefix of what
the policy sampled. `WindowRun` knows positions, rows, stop tokens and counts, and nothing about
probability; policies know probability and nothing about positions.

A step works on tensors that keep their addresses and reads nothing back, so that it may be captured
as a CUDA graph (see `mmaccel.samplers.window.step_runner`). After one or more steps the host
synchronises once (`sync`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from math import isfinite
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.checks import check_int
from mmaccel.contracts import FinishedRow, Policy, Prompt, TokenModel
from mmaccel.errors import OptionError, ShapeError
from mmaccel.kernels import dispatch
from mmaccel.kernels.accept_prefix import RowState, accept_prefix, count_pass
from mmaccel.kernels.window_inputs import WindowInputs, window_inputs
from mmaccel.results import Generation, OnStep, Progress, Stats
from mmaccel.samplers.arithmetic import find_arithmetic
from mmaccel.samplers.checks import check_limit, invalid_logits
from mmaccel.samplers.drafting.contract import (
    Drafts,
    Frontier,
    PassScores,
    check_proposed,
)
from mmaccel.samplers.drafting.copying import last_known
from mmaccel.samplers.noise import Fresh, Noise, Stream
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.counters import RunCounters, count_gains
from mmaccel.samplers.window.recorder import StepRecorder
from mmaccel.samplers.window.rolling_noise import FreshAhead, RollingNoise
from mmaccel.samplers.window.scheduler import SupportsContinuousBatching, WindowScheduler
from mmaccel.samplers.window.step_runner import (
    GraphKey,
    Once,
    StaticBuffers,
    StepRunner,
    make_graph_key,
    runner_of,
)
from mmaccel.samplers.window.step_state import StepState
from mmaccel.samplers.window.token_buffer import TokenBuffer, measure
from mmaccel.samplers.window.window_size import find_calibration, make_chooser

if TYPE_CHECKING:
    from mmaccel.samplers.window.policy import WindowPolicy

_SHORT = 1024  # tokens of prompts; longer ones keep a device busy without a graph
_ROWS_ON_HOST = 64  # with more, operations over the whole batch take less than rows one by one
_STATIC = (  # tensors that outlive a step, by attribute; `hold` has its own
    "buffer.tokens", "buffer.n_generated", "buffer.filled", "buffer.last_of_prompt", "buffer.index",
    "impossible", "frozen", "_lengths", "_stops", "_limit", "_ended", "_n_new", "_summary",
    "_short_prompt",
    "noise.seeds", "noise.items", "noise.schedule",
    "counters.passes", "counters.is_bad", "counters.gains", "counters.spent",
)  # fmt: skip


class WindowRun:
    """One decoding run of B rows.

    A policy hands its step to `run`, or repeats `run_step` while `width` is not 0 and calls
    `finish`. A step calls, in this order: `propose` and `write_drafts` (if it drafts), `forward`,
    `accept`. A policy whose steps cannot be captured calls these itself, followed by `sync`.

    Args:
        policy: its `window` and its draft source are used.
        model, prompt, length, params, noise, on_step: as in `mmaccel.contracts.Policy.sample`.

    Attributes:
        width: W of the next pass; 0 once every row has ended.
        is_retry: whether the next pass repeats one that an invalid draft may have spoiled.
        buffer: the tokens of all rows and the window over them.
        prompt: of the B rows that are decoded now.
        scheduler: assigns the prompt's rows to B batch slots; None without `ContinuousBatching`.
        impossible: `[S]` int64, ids that need not be drafted, or None.
        drafter: drafts the slots that no pass has predicted, and may correct others.
        state: what a step hands to the next one.
        last_scores: `[B, V]`, scores of the last pass's right-most slot, where the drafter reads
            them.
        frozen: `[]` int64, what the kernels are told that frozen noise is for.
        runner: carries steps out.
        recorder: the model's `StepRecorder`; None without one.
        noise: the given noise, in tensors of the run's own.
        stats: counted so far.
        counters: counted so far on the device; `counters.passes` numbers the next pass.

    Raises:
        OptionError: a model that fills a canvas, length < 1, or a draft source that needs a layout
            which the prompt lacks.
        ShapeError: noise of another batch.
    """

    _rolling: RollingNoise | None = None  # of the rows as they stand; see `frozen_noise`
    _fresh: FreshAhead | None = None  # the same; see `fresh_noise`
    _inputs: WindowInputs | None = None  # of the next forward, where `write_drafts` made them
    is_retry = False
    width: int
    _step_began: float

    def __init__(
        self,
        policy: WindowPolicy,
        model: TokenModel,
        prompt: Prompt,
        length: int,
        *,
        params: SamplingParams,
        noise: Noise,
        on_step: OnStep | None = None,
    ) -> None:
        _check_run(policy, model, prompt, length, noise)
        source = policy.draft_source()
        source.check_layout(prompt.layout)
        self.runner = runner_of(model)
        self.scheduler = _open_scheduler(self.runner, model, prompt, noise)
        if self.scheduler is not None:
            prompt, noise = self.scheduler.prompt(), self.scheduler.noise()
        self.policy, self.model, self.prompt, self.length = policy, model, prompt, length
        self.params, self.noise, self.on_step = params, noise, on_step
        self.vocab_size = model.vocab_size
        self.stats = Stats(
            policy=repr(policy), exactness=policy.exactness, branches=prompt.branches
        )
        self.state = StepState(self.runner.is_static, prompt.tokens.device)
        self.last_scores = self.state.declare("last scores")
        self._variation = self.state.declare("variation")
        self.drafter = source.open(self)
        if self.scheduler is not None:
            self.scheduler.register(model)
        self.impossible = params.impossible(model.vocab_size)
        self.recorder: StepRecorder | None = getattr(model, "recorder", None)
        self.is_recorded = self.recorder is not None and self.recorder.is_active

        window, calibration = policy.window, None
        if window == "adaptive":
            conditions = (
                prompt.batch, prompt.branches, self.drafter.source, params.guidance_scale,
                params.temperature, params.top_k, params.top_p, params.min_p,
            )  # fmt: skip
            calibration = find_calibration(model, conditions)
        self.chooser = make_chooser(window, policy.exactness, prompt.batch, length, calibration)
        widest = self.chooser.widest

        key = make_graph_key(
            self.runner, policy, model, prompt, length, params, widest=widest,
            drafter=self.drafter, has_callback=on_step is not None,
            is_refilled=self.scheduler is not None,
        )  # fmt: skip
        self._capacity = measure(prompt, length) if key is None else key.capacity
        self._short_prompt = None if self.scheduler is not None else _find_short_prompt(key, prompt)
        self.buffer = TokenBuffer(prompt, self._capacity, widest)
        if "drafts" in vars(policy):  # a field, which the caller chose
            self.stats.drafts = self.drafter.source.name or repr(self.drafter.source)
        if self.drafter.note:
            self.stats.notes.append(self.drafter.note)
        n_generated = self.buffer.n_generated
        n_each = self.runner.sync_every
        n_passes = (n_each + 1) * self._capacity.slots + n_each  # a retry for each, see `_retry`
        self.counters = RunCounters(prompt.batch, n_passes, n_generated.device)
        self._lengths, self._stops = prompt.lengths, prompt.stop_tokens
        self._limit = n_generated.new_full((), length)
        self.frozen = n_generated.new_full((), Stream.FROZEN)
        n_open = prompt.batch if self.scheduler is None else self.scheduler.n_open
        self._ended = torch.arange(prompt.batch, device=n_generated.device) >= n_open
        self._n_new = torch.zeros_like(n_generated)  # tokens of the last pass
        self._summary = n_generated.new_zeros(4)  # see `_count`
        buffers = self.runner.load(key, self.static_inputs() if self.runner.is_static else {})
        self._buffers = StaticBuffers({}) if buffers is None else buffers
        if buffers is not None:
            self._use(buffers)

        self._began = time.perf_counter()
        self._n_open, self._n_tokens = n_open, 0  # rows that have not ended, tokens so far
        self._n_captures = self.runner.captures
        self._prefill()
        self._begin_step(length)

    @cached_property
    def is_on_host(self) -> bool:
        """Whether a step may read its tensors and take the rows of a batch one by one: few rows on
        a CPU, of which no step is captured, without kernels (which the interpreter runs there).
        """
        tokens = self.buffer.tokens
        if self.runner.is_static or dispatch.takes("accept_prefix", tokens.device.type):
            return False
        return tokens.device.type == "cpu" and len(tokens) <= _ROWS_ON_HOST

    def static_inputs(self) -> dict[str, Tensor]:
        """Tensors that outlive a step, by name, with the values that the run begins with."""
        found = {name: attrgetter(name)(self) for name in _STATIC}
        return {name: value for name, value in found.items() if value is not None}

    def _use(self, buffers: StaticBuffers) -> None:
        """Go on with static buffers; what the last step of another run left there is ignored."""
        self.noise = Noise(self.noise.seeds, self.noise.items)  # the caller's stays as it is
        for name, value in buffers.inputs.items():
            owner, _, attribute = name.rpartition(".")
            vars(attrgetter(owner)(self) if owner else self)[attribute] = value
        self.state.use(buffers.state)

    def _prefill(self) -> None:
        """Run the prompt without its last token; once more if memory lacked and graphs had some."""
        try:
            self._prefill_once()
            return
        except torch.OutOfMemoryError:
            if not self.runner.free_memory():
                raise
        self._prefill_once()  # here, as the handler still refers to the tensors of the failed pass

    def _prefill_once(self) -> None:
        tokens = self.prompt.tokens
        if self.scheduler is not None and self.scheduler.is_endless:  # it has room for longer ones
            tokens = tokens[:, : int(self.prompt.lengths.max())]
        self.runner.reserve(self.model, tokens.shape[0], self._capacity.positions)
        began = time.perf_counter()
        n_processed = process_prompt(self.model)
        self._has_own_prompt = n_processed is not None
        if n_processed is not None:
            self.stats.forward_seconds += time.perf_counter() - began
            self.stats.prefill_passes += 1
            self.stats.tokens_processed += n_processed
        elif tokens.shape[1] > 1:
            self._prefill_tokens(tokens[:, :-1])
            self.stats.forward_seconds += time.perf_counter() - began
            self.stats.prefill_passes += 1
            self.stats.tokens_processed += tokens[:, :-1].numel()

    def _prefill_tokens(self, tokens: Tensor) -> None:
        """Prefill with `[R, N]`, in a step of its own."""
        given, lengths = self._short_prompt, self._lengths
        if given is None:
            self.model.prefill(tokens.clamp(min=0), lengths.new_zeros(1).expand_as(lengths))
            return
        width = getattr(self.model, "prompt_width", int)(tokens.shape[1])

        def step() -> None:
            start = lengths.new_zeros(1).expand_as(lengths)
            self.model.prefill(given[:, :width].clamp(min=0), start)

        self.runner.run_step(Once("prompt", width), step)

    def run(self, step_fn: Callable[[], None]) -> Generation:
        """Repeat a step until every row has ended; see `run_step`."""
        while self.width:
            self.run_step(step_fn)
        return self.finish()

    def run_step(self, step_fn: Callable[[], None]) -> None:
        """Carry out a step, or as many as lie between two synchronisations with the host.

        Args:
            step_fn: the step. Tensors of earlier steps are found in this object; see `hold`.

        Raises:
            NumericsError: the next token of a row has invalid logits, whatever the drafts.
        """
        has_begun = self.stats.passes > 0  # the first step has no earlier one to draft from
        n_passes = self.runner.sync_every if has_begun and self.on_step is None else 1
        key: Any = self.width if has_begun else Once("first pass", self.width)
        if self.is_retry:
            n_passes, key = 1, None
        self.state.names |= self._buffers.first_state  # where that step is replayed

        def step() -> None:
            if not has_begun:
                self.state.names.clear()
            if self.runner.is_static or n_passes > 1:  # otherwise `_begin_step` has done it
                self.buffer.move_window(self.width)
            step_fn()

        is_usual = True
        try:
            for _ in range(n_passes):
                is_usual &= self.runner.run_step(key, step)
        except torch.OutOfMemoryError:
            self.runner.free_memory()  # for the next call
            raise
        if not has_begun:
            self._buffers.first_state = set(self.state.names)
        self.sync(n_passes, is_usual)

    def propose(self) -> Drafts:
        """What the drafter proposes for all draft slots of the window, `[B, W-1]`."""
        if not self.drafter.source.keeps_predictions:
            self.buffer.forget_drafts()
        if self.is_retry:
            return Drafts(last_known(self.frontier()))
        found = self.drafter.propose(self)
        if not self.drafter.source.is_capturable:
            shape = (len(self.buffer.tokens), self.width - 1, self.vocab_size)
            check_proposed(self.drafter.source, found, shape)
        return found

    def frontier(self) -> Frontier:
        """What is known where the window's drafts begin."""
        buffer = self.buffer
        return Frontier(
            buffer.tokens, buffer.origin, buffer.filled, buffer.slots[:, :-1],
            self.last_scores.value, self.prompt.layout, self.vocab_size, self.impossible,
            None if self.scheduler is None else buffer.n_generated == 0,
        )  # fmt: skip

    def observe(self, noise: Tensor | None) -> None:
        """Show the drafter what the forward pass said; between `forward` and `accept`.

        Args:
            noise: frozen noise of the window, see `frozen_noise`; None where nothing is corrected.
        """
        if self.drafter.source.reads_scores:
            self.drafter.observe(self, self._pass_scores, noise)

    def forced(self) -> Tensor | None:
        """What the layout demands at each draft slot, `[B, W-1]` int64, -1 where free; or None."""
        layout = self.prompt.layout
        return None if layout is None else layout.forced(self.buffer.slots[:, :-1])

    def is_over(self, slots: Tensor) -> Tensor:
        """`[B, W]` bool: which of the slots nobody wants, as they lie behind a row's end."""
        return self._ended[:, None] | (slots >= self._limit)

    def write_drafts(self, new: Tensor) -> Tensor:
        """Write `new` `[B, W-1]` where the last pass predicted nothing, and forced tokens.

        Returns:
            `[B, W-1]` int64, the drafts that the model will process.
        """
        found = self._window_inputs(new, self.forced())
        if not self.drafter.source.corrects:  # before the model reads them
            self._inputs = found
        assert found.drafts is not None
        return found.drafts

    def _window_inputs(self, new: Tensor | None, forced: Tensor | None) -> WindowInputs:
        """See `mmaccel.kernels.window_inputs`."""
        buffer = self.buffer
        return dispatch.run(
            window_inputs, buffer.tokens, buffer.n_generated, buffer.filled, buffer.last_of_prompt,
            self._lengths, new, forced, origin=buffer.origin, width=buffer.slots.shape[1],
        )  # fmt: skip

    def frozen_noise(self) -> Tensor:
        """Frozen Gumbel noise of the window, see `Noise.frozen`: `[B, W, V]`, or `[B, W, 1]`.

        Nobody writes to it: it may be a view of what the next passes read.
        """
        slots = self.buffer.slots
        if self.params.temperature == 0 or not self.is_on_host:
            return self.noise.frozen(slots, self.vocab_size, self.params.temperature)
        if self._rolling is None:
            widest = self.chooser.widest
            self._rolling = RollingNoise(self.noise, self.vocab_size, widest, self.length)
        return self._rolling.take(slots)

    def fresh_noise(self) -> Fresh:
        """Uniforms of this pass; see `Noise.fresh`."""
        slots, passes = self.buffer.slots, self.counters.passes
        if not self.is_on_host:
            return self.noise.fresh(slots, passes)
        if self._fresh is None:
            self._fresh = FreshAhead(self.noise)
        return self._fresh.take(slots, passes)

    def n_new_drafts(self) -> int:
        """How many draft slots at the window's end some row has no prediction for, at most W-1.

        Cost: a host synchronisation; W-1 without one where a step may not read its tensors.
        """
        buffer, n_drafts = self.buffer, self.width - 1
        if not self.is_on_host:
            return n_drafts
        n_predicted = (buffer.filled.numpy() - buffer.n_generated.numpy()).min() - buffer.origin
        return n_drafts - min(max(int(n_predicted), 0), n_drafts)

    def next_positions(self) -> Tensor:
        """`[R]` int64, the position at which the next pass of every row starts."""
        lengths = self._lengths.view(self.prompt.branches, -1)  # [G, B]
        return (lengths - 1 + self.buffer.n_generated).flatten()

    def logits(self) -> Tensor:
        """One forward pass over the window: raw logits `[R, W, V]` of all branches.

        The caller passes its result on to `record_scores`.
        """
        _, tokens, start = self._inputs or self._window_inputs(None, None)
        self._inputs = None
        began = time.perf_counter()
        logits = self.model.forward(tokens, start).detach()
        self.stats.forward_seconds += time.perf_counter() - began
        if not self._buffers.arithmetic:  # a replay of another run's graph does not come here
            self._buffers.arithmetic = find_arithmetic(self.model, logits)
        if self.is_recorded:
            self._record("logits", logits[: self.prompt.batch])
        return logits

    def _record(self, name: str, value: Tensor) -> None:
        assert self.recorder is not None
        self.recorder.record(name, value)

    def forward(self) -> Tensor:
        """One forward pass over the window.

        Returns:
            Scores `[B, W, V]` float32 of the target distribution of each slot; see
            `SamplingParams.apply`.
        """
        scores = self._to_scores(self.logits(), slice(None))
        self._peak = scores.amax(-1)  # [B, W]
        if self.reads_last_scores:
            self.last_scores.hold(scores[:, -1].clone())  # a view would keep the whole window's
        return scores

    def record_scores(self, logits: Tensor, peak: Tensor, last: Tensor | None = None) -> None:
        """Record what `forward` records of its scores, where a kernel sampled without any.

        Args:
            logits: from `logits()`.
            peak: `[B, W]`, the largest score of every slot after all filters.
            last: `[B, V]`, the scores of the last slot, where the kernel wrote them.
        """
        self._peak = peak
        if not self.reads_last_scores:
            return
        if last is None:
            last = self._to_scores(logits[:, -1:], slice(-1, None))[:, 0]
        self.last_scores.hold(last)

    @property
    def reads_last_scores(self) -> bool:
        """Whether the next pass drafts from the scores of this one's last slot."""
        return self.drafter.source.reads_last_scores

    def _to_scores(self, logits: Tensor, part: slice) -> Tensor:
        """Logits of a part of the window's slots to scores of their target distribution."""
        buffer, prompt = self.buffer, self.prompt
        columns, slots = buffer.columns[:, part], buffer.slots[:, part]
        processed = self.params.to_processed_scores(
            logits, prompt.branches, buffer.tokens, columns, slots, prompt.layout
        )
        scores = self.params.finish_scores(processed, slots, prompt.layout)
        if self.drafter.source.reads_scores:
            # at temperature 0 the target's scores are of one token
            shown = scores if self.params.temperature else processed
            self._pass_scores = PassScores(shown, processed[:, -1].clone())
        if self.is_recorded:
            self._record("scores", scores if self.params.temperature else processed)
        return scores

    def accept(self, tokens: Tensor, kept: Tensor, variation: Tensor | None = None) -> None:
        """Generate each row's tokens up to its first wrong draft; the rest are drafts.

        Args:
            tokens: `[B, W]` int64, the window's new contents.
            kept: `[B, W-1]` bool, which drafts were right. With n leading ones, n + 1 tokens are
                generated.
            variation: `[B, W-1]`, the total variation that a relaxed policy spends on each draft
                slot. Only slots whose tokens were accepted are charged.
        """
        if variation is not None:
            self._variation.hold(variation)
        if self.is_on_host and not self.is_recorded:
            self._accept_on_host(tokens, kept)
            self.drafter.accepted(self, self._n_new)
            return
        before = self.buffer.n_generated.clone() if self.is_recorded else None
        dispatch.run(
            accept_prefix, tokens, kept, self._peak, self._variation.value, self._row_state(),
            self._limit, self._stops, origin=self.buffer.origin, counts=self.on_step is None,
        )  # fmt: skip
        if before is not None:
            assert self.recorder is not None
            self.recorder.accept(before, self._n_new)
        self.drafter.accepted(self, self._n_new)

    def _row_state(self) -> RowState:
        buffer, counters = self.buffer, self.counters
        return RowState(
            buffer.tokens, buffer.n_generated, buffer.filled, self._ended, self._n_new,
            counters.is_bad, counters.passes, counters.gains, counters.spent, self._summary,
        )  # fmt: skip

    def _accept_on_host(self, tokens: Tensor, kept: Tensor) -> None:
        """`accept` row by row in plain numbers: thirty small operations of torch take longer."""
        buffer, width = self.buffer, self.width
        n_accepted = [1 + (row + [False]).index(False) for row in kept.tolist()]
        written, new, peak = buffer.tokens.numpy(), tokens.numpy(), self._peak.detach().numpy()
        n_generated, filled = buffer.n_generated.numpy(), buffer.filled.numpy()
        ended, is_bad, gained = (
            self._ended.numpy(),
            self.counters.is_bad.numpy(),
            self._n_new.numpy(),
        )
        stops = () if self._stops is None else self._stops.tolist()
        for row, n_new in enumerate(n_accepted):
            first = buffer.origin + int(n_generated[row])
            filled[row] = first + width
            if ended[row]:
                written[row, first : first + width] = gained[row] = 0
                continue
            written[row, first : first + width] = new[row]
            n_new = min(n_new, self.length - int(n_generated[row]))
            scores = peak[row, :n_new].tolist()
            for k, token in enumerate(new[row, :n_new].tolist()):
                if not isfinite(scores[k]):
                    is_bad[row], n_new = True, k
                    break
                if token in stops:
                    ended[row], n_new = True, k + 1
                    break
            gained[row] = n_new
            n_generated[row] += n_new
            ended[row] |= n_generated[row] >= self.length
        if self.on_step is None:
            self._count()

    def sync(self, n_passes: int = 1, is_usual: bool = True) -> None:
        """Read what the last passes generated, refill the batch and begin the next step.

        Args:
            n_passes: passes since the last synchronisation.
            is_usual: False if a pass took longer than others like it will, as captures do.

        Raises:
            NumericsError: the next token of a row has invalid logits, whatever the drafts.
        """
        self.stats.passes += n_passes
        self.stats.tokens_processed += n_passes * self.width * len(self._lengths)
        if self.on_step is not None:
            self._call_on_step(self.on_step)
            self._count()
        remaining, n_open, n_tokens, is_bad = self._summary.tolist()  # the only synchronisation
        scheduler = self.scheduler
        if is_bad:
            self._retry()
            return
        if is_usual and not self.is_retry:
            seconds = (time.perf_counter() - self._step_began) / n_passes
            gained = (n_tokens - self._n_tokens) / n_passes
            self.chooser.observe(gained, self._n_open, seconds)
        if scheduler is not None and (n_open < scheduler.n_open or scheduler.has_room):
            if scheduler.refill(self):
                remaining = self.length
            n_open, n_tokens = scheduler.n_open, int(self.buffer.n_generated.sum())
        self._n_open, self._n_tokens = n_open, n_tokens
        self.is_retry = False
        self._begin_step(remaining)

    def _retry(self) -> None:
        """Verify other drafts after a pass in which a row wanted a token of invalid scores.

        Attention multiplies the values that a mask hides by 0, which leaves NaN: keys and values of
        a draft that is thrown away make the slots before it invalid. Copies of each row's last
        token overwrite them. The row is really invalid if that changes nothing.

        Raises:
            NumericsError: the last pass had no drafts, or was such a pass already; or its first
                token followed a prompt that the model itself processed.
        """
        buffer, is_bad = self.buffer, self.counters.is_bad & ~self._ended
        is_final = self.is_retry or self.width == 1
        if not is_final and self._has_own_prompt:
            is_final = bool((is_bad & (buffer.n_generated == 0)).any())
        if is_final:
            rows = range(len(is_bad)) if self.scheduler is None else self.scheduler.rows
            bad = zip(rows, is_bad.tolist())
            raise invalid_logits(tuple(row for row, is_one in bad if is_one))
        self.is_retry = True
        self.counters.is_bad.zero_()
        buffer.forget_drafts()
        self._step_began = time.perf_counter()
        if not self.runner.is_static:
            buffer.move_window(self.width)

    def _begin_step(self, remaining: int) -> None:
        """Choose the next window; `remaining` slots are wanted by the row that wants most."""
        self._step_began = time.perf_counter()
        if remaining and self.runner.is_static:  # a graph per width: none for a row's end alone
            remaining = max(remaining, self.chooser.widest)
        self.width = self.chooser.choose(remaining) if remaining else 0
        if not self.runner.is_static:
            self.buffer.move_window(self.width)

    def _count(self) -> None:
        """Count a pass in which rows gained `_n_new` tokens, and sum up what the host reads."""
        if not self.is_on_host:
            count_pass(self._row_state(), self._variation.value, self._limit)
            return
        n_generated, ended, counters = self.buffer.n_generated, self._ended, self.counters
        counters.count_on_host(self._n_new.tolist(), self._variation.value)
        made = n_generated.tolist()
        left = [0 if end else self.length - n for n, end in zip(made, ended.tolist())]
        bad = any(n > 0 and is_one for n, is_one in zip(left, counters.is_bad.tolist()))
        self._summary.numpy()[:] = max(left), sum(n > 0 for n in left), sum(made), bad

    def _call_on_step(self, on_step: OnStep) -> None:
        """Report the last pass to `on_step`, and end rows where it says so."""
        tokens, lengths = self.buffer.generated(self.length), self.buffer.n_generated.clone()
        previous = lengths - self._n_new
        rows = () if self.scheduler is None else tuple(self.scheduler.rows)
        limit = on_step(Progress(tokens, lengths, previous, self.stats.passes, rows))
        if limit is not None:
            limit = check_limit(limit, lengths)
            self._ended |= limit <= lengths
            self.buffer.n_generated.copy_(torch.minimum(lengths, limit))
        self._n_new.copy_((self.buffer.n_generated - previous).clamp(min=0))

    def ended(self) -> list[bool]:
        """Which rows have ended. Cost: one host synchronisation."""
        found: list[bool] = self._ended.tolist()
        return found

    def finished_row(self, batch_slot: int, row: int) -> FinishedRow:
        """The result of row `row`, which is in a batch slot. Cost: some host synchronisations."""
        n_generated = int(self.buffer.n_generated[batch_slot])
        tokens = self.buffer.generated(n_generated)[batch_slot].clone()
        gains, variation = self.counters.row(batch_slot)
        return FinishedRow(row, tokens, len(gains), count_gains(gains), variation)

    def restart(self, batch_slots: Tensor, prompt: Prompt, noise: Noise) -> None:
        """Begin anew in some batch slots, whose prompts the caller prefills.

        Args:
            batch_slots: `[n]` int64.
            prompt, noise: of all B batch slots.
        """
        self.prompt = prompt
        self.buffer.restart(batch_slots, prompt)
        self._lengths.copy_(prompt.lengths)
        self._ended[batch_slots] = False
        self.counters.restart(batch_slots)
        self.noise.refill(noise)
        self._rolling = self._fresh = None
        self.drafter.begin_rows(self, batch_slots)

    def keep_rows(self, batch_slots: Tensor, prompt: Prompt) -> None:
        """Go on with these batch slots, `[n]` int64; `prompt` is theirs. What stands there again
        is `restart`ed next.
        """
        self.prompt = prompt
        self.buffer.keep_rows(batch_slots, prompt)
        self._lengths, self._ended = prompt.lengths, self._ended[batch_slots]
        self._n_new, self.noise = self._n_new[batch_slots], self.noise.rows(batch_slots)
        self._rolling = self._fresh = None
        self.state.keep_rows(batch_slots)
        self.counters.keep_rows(batch_slots)

    def process_filler(self, filler: Tensor, widest: int = 64) -> None:
        """Let rows that have ended go on with a filler, up to the end of the longest row.

        transformers' loop does so, too: afterwards the cache holds all but the last token of every
        row, and the recorder has all slots.

        Args:
            filler: `[]` int64.
            widest: slots of a pass, at most.

        Cost: a pass of all rows for every `widest` slots after the end of the shortest row.
        """
        buffer = self.buffer
        lengths = buffer.n_generated.clone()
        first, end = int(lengths.min()), int(lengths.max())
        made = buffer.generated(end)
        is_made = torch.arange(end, device=made.device) < lengths[:, None]
        made.copy_(torch.where(is_made, made, filler.to(made.device)))
        for slot in range(max(first, 1), end, widest):
            width = min(widest, end - slot)
            buffer.n_generated.fill_(slot)
            buffer.move_window(width)
            self.forward()
            if self.is_recorded:
                assert self.recorder is not None
                self.recorder.accept(buffer.n_generated, torch.full_like(lengths, width))
            self.stats.passes += 1
            self.stats.tokens_processed += width * len(self._lengths)
        buffer.n_generated.copy_(lengths)

    def finish(self) -> Generation:
        """The result, once `width` is 0."""
        if self.scheduler is None:
            lengths = self.buffer.n_generated.clone()
            index = torch.arange(self.length, device=lengths.device)[None]
            tokens = self.buffer.generated(self.length)
            tokens = torch.where(index < lengths[:, None], tokens, 0)
            passes = self.counters.report(self.stats)
        else:
            tokens, lengths, passes = self.scheduler.report(self.stats, self.length)
        self.stats.captures = self.runner.captures - self._n_captures
        self.stats.runner, self.stats.runner_reason = self.runner.name, self.runner.reason
        reason = getattr(self.model, "attention_reason", None)
        if reason is not None:
            self.stats.attention = f"the model's own: {reason}" if reason else "window_attention"
        self.stats.route = getattr(self.model, "route", "")
        self.stats.route_reason = getattr(self.model, "route_reason", "")
        self.stats.use_dtype(self._buffers.arithmetic)
        shared = getattr(self.model, "shared_rounding", "")
        if shared:
            self.stats.exactness = "relaxed"
            self.stats.notes.append(shared)
        if self.recorder is not None:
            self.recorder.finish(self)
        self.stats.seconds = time.perf_counter() - self._began
        self.runner.finish()
        self.drafter.close(self)
        if self.scheduler is not None:
            self.scheduler.release_models()
        return Generation(tokens, lengths, passes, self.stats)


def process_prompt(model: Any) -> int | None:
    """Let a model that has a prompt of its own process it.

    Returns:
        How many tokens it processed; None for a model whose prompt `prefill` processes.
    """
    own = getattr(model, "process_prompt", None)
    n_processed: int | None = None if own is None else own()
    return n_processed


def _check_run(policy: Policy, model: object, prompt: Prompt, length: int, noise: Noise) -> None:
    if not hasattr(model, "prefill"):
        raise OptionError(
            f"policy: expected one that fills a canvas for a {type(model).__name__}, received "
            f"{policy!r}, which decodes token after token; choose one such as Stepwise()"
        )
    check_int("length", length, 1, 2**31 - 1, hint="ask for 1 or more tokens")
    if noise.seeds.shape[0] != prompt.batch:
        raise ShapeError(
            f"noise: expected {prompt.batch} rows, received {noise.seeds.shape[0]}; "
            "make it for this batch"
        )


def _find_short_prompt(key: GraphKey | None, prompt: Prompt) -> Tensor | None:
    """`[R, N]`, a prompt whose prefill is worth a graph; None for long ones and without graphs."""
    if key is None or len(prompt.tokens) * key.capacity.origin > _SHORT:
        return None
    return pad(prompt.tokens, (0, key.capacity.origin - prompt.tokens.shape[1]))


def _open_scheduler(
    runner: StepRunner, model: TokenModel, prompt: Prompt, noise: Noise
) -> WindowScheduler | None:
    """The scheduler of a run; None without continuous batching."""
    if prompt.batching is None:
        return None
    is_fixed = runner.is_static or not isinstance(model, SupportsContinuousBatching)
    return WindowScheduler(prompt, prompt.batching, noise, is_fixed)
