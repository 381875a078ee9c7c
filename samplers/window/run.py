"""WindowRun: the loop of window decoding.

A step drafts the window, runs one forward pass of the model over it, and accepts a prefix of what
the policy sampled. The loop knows rows, stop tokens and counts, and nothing about probability;
policies know probability and nothing about positions. `WindowRun` is the loop over its rows
(`rows.py`), its passes (`passes.py`), their noise (`rolling_noise.py`), its graphs
(`run_graphs.py`), the tensors that steps hand to each other (`step_state.py`), and its widths
(`window_size.py`). Whether a step takes rows one by one on the
host is decided once, by `mmaccel.kernels.dispatch.Backend`.

A step works on tensors that keep their addresses and reads nothing back, so that it may be captured
as a CUDA graph (see `mmaccel.samplers.window.step_runner`). After one or more steps the host
synchronises once (`sync`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmaccel.checks import check_callable, check_int, check_kind
from mmaccel.contracts import Prompt, TokenModel
from mmaccel.errors import OptionError
from mmaccel.kernels.dispatch import Backend
from mmaccel.results import Generation, OnStep, Stats
from mmaccel.samplers.checks import check_noise, invalid_logits
from mmaccel.samplers.drafting.contract import Drafter, Drafts, Frontier, PassPath, check_proposed
from mmaccel.samplers.drafting.copying import last_known
from mmaccel.samplers.noise import Fresh, Noise, Stream
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.trees.contract import count_spare
from mmaccel.samplers.window.passes import ModelCalls, ScorePasses
from mmaccel.samplers.window.rolling_noise import NoiseAhead, PassNoise
from mmaccel.samplers.window.rows import RunRows
from mmaccel.samplers.window.run_graphs import RunGraphs
from mmaccel.samplers.window.scheduler import WindowScheduler
from mmaccel.samplers.window.step_runner import Once, StepRunner
from mmaccel.samplers.window.step_state import StaticPart, StepState
from mmaccel.samplers.window.window_size import open_chooser

if TYPE_CHECKING:
    from mmaccel.samplers.window.policy import WindowPolicy

_FEW_PASSES = 16
_FEW_TOKENS = 1.15  # a pass


class WindowRun(StaticPart):
    """One decoding run of B rows.

    A policy hands its step to `run`, or repeats `run_step` while `width` is not 0 and calls
    `finish`. A step calls, in this order: `propose` and `write_drafts` (if it drafts), `forward`,
    `observe` (if it drafts), `accept`. A policy whose steps cannot be captured calls these itself,
    followed by `sync`.

    Args:
        policy: its `window` and its draft source are used.
        model, prompt, length, params, noise, on_step: as in `mmaccel.policies.Policy.sample`.

    Attributes:
        prompt: of the B rows that are decoded now.
        rows, buffer, counters: the rows; their tokens and the window over them; their counts.
            There from the first pass on, as are `calls` and `scores`.
        scheduler: assigns the prompt's rows to B batch slots; None without `ContinuousBatching`.
        drafter: drafts the window's slots.
        backend: carries out operations.
        runner: carries out steps.
        calls, scores: the calls to the model, and the scores of its passes.
        state: what a step hands to the next one.
        chooser: chooses widths; `chooser.widest` is the widest.
        width: W of the next pass; 0 once every row has ended.
        is_retry: whether the next pass repeats one that an invalid draft may have spoiled.
        pass_noise: how passes get the noise of their slots.
        variation: `[B, W-1]`, what a relaxed policy has spent in the last pass.
        impossible: `[S]` int64, ids that need not be drafted, or None.
        frozen: `[]` int64, what the kernels are told that frozen noise is for.
        noise: the given noise, in tensors of the run's own.
        stats: counted so far.

    Raises:
        OptionError: a model that fills a canvas, length < 1, or a draft source that needs a layout
            which the prompt lacks.
        ShapeError: noise of another batch.
    """

    static = ("impossible", "frozen")
    is_retry = False
    _is_narrowed = False  # whether the drafter chose a narrower pass than the chooser
    width: int

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
        check_callable("on_step", on_step)
        if not isinstance(model, TokenModel):
            raise OptionError(
                f"policy: expected one that fills a canvas for a {type(model).__name__}, received "
                f"{policy!r}, which decodes token after token; choose one such as Stepwise()"
            )
        check_int("length", length, 1, 2**31 - 1, hint="ask for 1 or more tokens")
        check_noise(noise.seeds, prompt.batch)
        source = policy.draft_source()
        source.check_layout(prompt.layout)
        self.runner: StepRunner = model.setup.runner or StepRunner()
        is_static = self.runner.is_static
        self.scheduler: WindowScheduler | None = None
        if prompt.batching is not None:
            self.scheduler = WindowScheduler(
                prompt, noise, model, source, batching=prompt.batching, is_static=is_static
            )
            prompt = self.scheduler.prompt()
            noise = self.scheduler.noise()
        self.policy = policy
        self.model = model
        self.prompt = prompt
        self.length = length
        self.params = params
        self.noise = noise
        self.on_step = on_step
        self.vocab_size = model.vocab_size
        device = prompt.tokens.device
        self.impossible = params.impossible(model.vocab_size)
        self.frozen = torch.full((), Stream.FROZEN, dtype=torch.int64, device=device)
        self.stats = Stats(
            policy=repr(policy), exactness=policy.exactness, branches=prompt.branches
        )
        self.state = StepState(is_static, device)
        last_scores = self.state.declare("last scores")
        self.variation = self.state.declare("variation")
        self.backend = Backend(device.type, prompt.batch, reads_back=not is_static)
        self.drafter = check_kind(
            f"{type(source).__name__}.open", source.open(self), Drafter, "return a Drafter(self)"
        )
        if "drafts" in vars(policy):  # a field, which the caller may have chosen
            self.stats.drafts = self.drafter.source.name or repr(self.drafter.source)
        if self.drafter.note:
            self.stats.notes.append(self.drafter.note)
        if self.scheduler is not None:
            self.scheduler.register(model)

        n_open = prompt.batch if self.scheduler is None else self.scheduler.n_open
        self.chooser = open_chooser(self)
        self.chooser.go_on(n_open, 0)
        widest = self.chooser.widest
        self.graphs = RunGraphs(self)
        n_each = self.runner.sync_every
        n_slots = self.graphs.capacity.slots
        self.rows = RunRows(
            prompt,
            length,
            self.graphs.capacity,
            widest=widest,
            n_passes=(n_each + 1) * n_slots + n_each,  # a retry for each, see `_retry`
            n_open=n_open,
            backend=self.backend,
        )
        self.buffer = self.rows.buffer
        self.counters = self.rows.counters
        spare = 0 if policy.tree is None else count_spare(policy.tree, model, widest)
        self.calls = ModelCalls(model, self.runner, self.stats, spare)
        self.scores = ScorePasses(
            self.calls, self.rows, params, drafter=self.drafter, last_scores=last_scores
        )
        noise_kind = self.backend.choose(PassNoise, NoiseAhead)
        self.pass_noise = noise_kind(self.vocab_size, params.temperature, widest, length)
        if is_static:
            self.noise = self.graphs.load(self.parts(), noise, self.state)
        self._begin()

    def _begin(self) -> None:
        """Process the prompt, and choose the first window."""
        self._began = time.perf_counter()
        tokens: Tensor | None = self.prompt.tokens
        scheduler = self.scheduler
        if scheduler is not None and scheduler.feeds_all:
            tokens = None  # they come between steps
        elif scheduler is not None and scheduler.is_endless:  # with room for longer ones
            tokens = self.prompt.tokens[:, : int(self.prompt.lengths.max())]
        positions = self.graphs.capacity.positions
        self.calls.begin(tokens, self.rows.lengths, positions, self.graphs.short_prompt)
        if scheduler is not None and tokens is None and not self.calls.has_own_prompt:
            scheduler.begin(self)
            self.chooser.go_on(scheduler.n_decoding, 0)
        self._begin_step(self.length)

    def parts(self) -> dict[str, StaticPart]:
        """The parts whose tensors outlive a step, by name."""
        return {
            "run": self,
            "rows": self.rows,
            "buffer": self.buffer,
            "counters": self.counters,
            "graphs": self.graphs,
        }

    def frontier(self) -> Frontier:
        """What is known where the window's drafts begin."""
        buffer = self.buffer
        return Frontier(
            buffer.tokens,
            buffer.origin,
            buffer.filled,
            buffer.slots[:, :-1],
            self.scores.last_scores.value,
            self.prompt.layout,
            self.vocab_size,
            self.impossible,
            None if self.scheduler is None else buffer.n_generated == 0,
            self.prompt.n_shown,
        )

    def frozen_noise(self) -> Tensor:
        """Frozen Gumbel noise of the window, see `Noise.frozen`: `[B, W, V]`, or `[B, W, 1]`.

        Nobody writes to it: it may be a view of what the next passes read.
        """
        return self.pass_noise.frozen(self.noise, self.buffer.slots)

    def restart(self, batch_slots: Tensor, prompt: Prompt, noise: Noise) -> None:
        """Begin anew in some batch slots, whose prompts the caller prefills.

        Args:
            batch_slots: `[n]` int64.
            prompt, noise: of all B batch slots.
        """
        self.prompt = prompt
        self.rows.restart(batch_slots, prompt)
        self.noise.refill(noise)
        self.pass_noise.forget()
        self.drafter.begin_rows(self, batch_slots)

    def hold(self, batch_slots: Tensor, prompt: Prompt) -> None:
        """Let rows in some batch slots wait for their prompts; see `RunRows.hold`."""
        self.prompt = prompt
        self.rows.hold(batch_slots, prompt)

    def keep_rows(self, batch_slots: Tensor, prompt: Prompt) -> None:
        """Go on with these batch slots, `[n]` int64; `prompt` is theirs. What stands there again
        is `restart`ed next.
        """
        self.prompt = prompt
        self.rows.keep_rows(batch_slots, prompt)
        self.noise = self.noise.rows(batch_slots)
        self.pass_noise.forget()
        self.state.keep_rows(batch_slots)

    def run(self, step_fn: Callable[[], None]) -> Generation:
        """Repeat a step until every row has ended; see `run_step`."""
        while self.width:
            self.run_step(step_fn)
        return self.finish()

    def run_step(self, step_fn: Callable[[], None]) -> None:
        """Carry out a step, or as many as lie between two synchronisations with the host.

        Args:
            step_fn: the step. Tensors of earlier steps are found in `state`.

        Raises:
            NumericsError: the next token of a row has invalid logits, whatever the drafts.
        """
        has_begun = self.stats.passes > 0  # the first step has no earlier one to draft from
        n_passes = self.runner.sync_every if has_begun and self.on_step is None else 1
        key: Hashable | None = self.width
        if not has_begun:  # logits of the prompt are no pass's own tensors
            key = None if self.calls.knows_first else Once("first pass", self.width)
        has_pieces = bool(self.calls.pieces)
        if self.is_retry or has_pieces:
            key = None
            n_passes = 1
        moves_here = self.runner.is_static or n_passes > 1  # otherwise `_begin_step` has done it

        def step() -> None:
            if not has_begun:
                self.state.names.clear()
            if moves_here:
                self.buffer.move_window(self.width)
            step_fn()

        self.calls.n_behind = self.graphs.buffers.n_behind.get(key, 0)  # of a replayed pass
        is_usual = self.graphs.run_steps(step, key, n_passes, self.state, self.width)
        self.graphs.buffers.n_behind[key] = self.calls.n_behind
        self.sync(n_passes, is_usual and not has_pieces)

    def propose(self) -> Drafts:
        """What the drafter proposes for all draft slots of the window, `[B, W-1]`; in a pass that
        repeats one copies of each row's last token.

        Raises:
            ShapeError: a source proposes something else than `Drafts` describes.
        """
        source = self.drafter.source
        if not source.keeps_predictions:
            self.buffer.forget_drafts()
        if self.is_retry:
            return Drafts(last_known(self.frontier()))
        found = self.drafter.propose(self)
        if self.width > 1:
            shape = (len(self.buffer.tokens), self.width - 1, self.vocab_size)
            refuses_nan = not self.policy.freezes_noise or self.stats.passes == 0
            check_proposed(source, found, shape, refuses_nan)
        return found

    def write_drafts(self, new: Tensor) -> Tensor:
        """Write `new` `[B, W-1]` where the last pass predicted nothing, and forced tokens.

        Returns:
            `[B, W-1]` int64, the drafts that the model will process.
        """
        return self.rows.write_drafts(new, is_final=not self.drafter.source.corrects)

    def fresh_noise(self) -> Fresh:
        """Uniforms of this pass; see `Noise.fresh`."""
        return self.pass_noise.fresh(self.noise, self.buffer.slots, self.counters.passes)

    def forward(self) -> Tensor:
        """One forward pass over the window.

        Returns:
            Scores `[B, W, V]` float32 of the target distribution of each slot; see
            `SamplingParams.apply`.
        """
        return self.scores.forward()

    def observe(self, noise: Tensor | None) -> None:
        """Show the drafter what the forward pass said; between `forward` and `accept`.

        Args:
            noise: frozen noise of the window, see `frozen_noise`; None for none.
        """
        scores = self.scores.observed()
        if scores is not None:
            self.drafter.observe(self, scores, noise)

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
            self.variation.hold(variation)
        rows = self.rows
        recording = self.calls.recording
        before = None if recording is None else self.buffer.n_generated.clone()
        rows.accept(
            tokens, kept, self.scores.peak, self.variation.value, counts=self.on_step is None
        )
        if recording is not None and before is not None:
            recording.accept(before, rows.n_new)
        self.drafter.accepted(self, rows.n_new)

    def accept_path(self, path: PassPath, tokens: Tensor, kept: Tensor) -> None:
        """As `accept`, after a pass over a tree of which `path` stands for the window."""
        self.accept(tokens, kept)
        self.calls.commit(self.rows.first_positions(), path.entries, self.rows.n_new)

    def sync(self, n_passes: int = 1, is_usual: bool = True) -> None:
        """Read what the last passes generated, refill the batch and begin the next step.

        Args:
            n_passes: passes since the last synchronisation.
            is_usual: False if a pass took longer than others like it will, as captures do.

        Raises:
            NumericsError: the next token of a row has invalid logits, whatever the drafts.
        """
        rows = self.rows
        scheduler = self.scheduler
        n_entries = self.width * len(rows.lengths) + self.calls.n_behind
        if self.calls.knows_first and self.width == 1 and not self.stats.passes:
            self.stats.prefill_passes -= 1  # the prompt's pass gives the first tokens
            n_entries = 0
        self.stats.passes += n_passes
        self.stats.tokens_processed += n_passes * n_entries
        if self.on_step is not None:
            numbers = () if scheduler is None else tuple(scheduler.rows)
            rows.call_on_step(self.on_step, self.stats.passes, numbers)
            rows.count(self.variation.value)
        remaining, n_open, n_tokens, is_bad = rows.summary.tolist()  # the only synchronisation
        if is_bad:
            self._retry()
            return
        is_usual = is_usual and not self.is_retry
        seconds = self.chooser.end(n_passes, n_tokens, is_usual=is_usual and not self._is_narrowed)
        self.drafter.timed(self, seconds)
        if scheduler is not None and (n_open < scheduler.n_open or scheduler.has_room):
            if scheduler.refill(self):
                remaining = self.length
            n_open = scheduler.n_decoding
            n_tokens = int(self.buffer.n_generated.sum())
        self.chooser.go_on(n_open, n_tokens)
        self.is_retry = False
        self._begin_step(remaining)

    def _retry(self) -> None:
        """Repeat the last pass once, as an invalid draft may have spoiled it.

        Attention multiplies the values that a mask hides by 0, which leaves NaN: keys and values of
        a draft that is thrown away make the slots before it invalid. Copies of each row's last
        token overwrite them in a second pass. The row is really invalid if that changes nothing.

        Raises:
            NumericsError: the pass had no drafts, was such a repetition already, or its first token
                followed a prompt that the model itself processed.
        """
        is_bad = self.rows.bad_rows()
        is_final = self.is_retry or self.width == 1
        if not is_final and self.calls.knows_first:
            is_final = bool((is_bad & (self.buffer.n_generated == 0)).any())
        if is_final:
            numbers = range(len(is_bad)) if self.scheduler is None else self.scheduler.rows
            bad = zip(numbers, is_bad.tolist())
            raise invalid_logits(tuple(row for row, is_one in bad if is_one))
        self.is_retry = True
        self.buffer.release(is_bad)
        self.counters.is_bad.zero_()
        self.buffer.forget_drafts()
        self.chooser.begin_again()
        if not self.runner.is_static:
            self.buffer.move_window(self.width)

    def _begin_step(self, remaining: int) -> None:
        """Choose the next window; `remaining` slots are wanted by the row that wants most."""
        chosen = self.chooser.begin(remaining)
        self.width = self.drafter.choose_width(self, chosen) if chosen else 0
        self._is_narrowed = self.width < chosen
        if not self.runner.is_static:
            self.buffer.move_window(self.width)

    def finish(self) -> Generation:
        """The result, once `width` is 0."""
        stats = self.stats
        if self.scheduler is None:
            made = self.rows.report(stats)
        else:
            made = Generation(*self.scheduler.report(stats, self.length), stats)
        self.graphs.describe(stats, self.calls.formats.name, self.model.route.same_bits)
        self.calls.describe()
        recorder = self.model.setup.recorder
        if recorder is not None:
            recorder.finish(self)
        is_text = self.model.is_text and self.prompt.layout is None
        if is_text and self.policy.freezes_noise and not self.drafter.source.chooses_widths:
            self._note_lost_width()
        stats.seconds = time.perf_counter() - self._began
        self.runner.finish()
        self.drafter.close(self)
        if self.scheduler is not None:
            self.scheduler.release_models()
        return made

    def _note_lost_width(self) -> None:
        """Say it where nearly all drafts of a text were wrong, and every pass was a wide one."""
        stats = self.stats
        window = self.policy.window
        is_wide = isinstance(window, int) and window > 1 and stats.passes >= _FEW_PASSES
        if is_wide and stats.tokens_per_pass < _FEW_TOKENS:
            stats.notes.append(
                f"window={window}: {stats.tokens_per_pass:.2f} tokens a pass; give a narrower one, "
                "or drafts='suffix', which makes passes wide only where that pays"
            )
