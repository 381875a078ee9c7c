"""The window loop: feed a window, let a sampler judge it, keep what it keeps.

This is the host's side; what a pass does on the device is `mmaccel.samplers.window.run`. Both know
positions, rows, stops and counts, and nothing about probability; the samplers know probability and
nothing about positions. After a pass the host looks once: at the number of slots still wanted, and
at whether a score was NaN.

What a pass does on the device: feed the window, filter, keep what a sampler keeps, count.

Everything here works on tensors that stay in their places and reads nothing back, so that a pass
may be captured (see `mmaccel.samplers.window.step_runner`); the host's side is `mmaccel.samplers.window.run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import attrgetter

import torch
from torch import Tensor

from mmaccel.contracts import FinishedRow, Policy, Prompt, TokenModel
from mmaccel.results import Generation, OnStep, Progress, Stats
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.checks import check_run, invalid_logits
from mmaccel.samplers.window.counters import RunCounters, count_gains
from mmaccel.samplers.window.scheduler import WindowScheduler
from mmaccel.samplers.window.step_runner import StaticBuffers, make_graph_key, runner_of
from mmaccel.samplers.window.token_buffer import TokenBuffer, check_limit, cut_at_stop
from mmaccel.samplers.window.window_size import find_calibration, make_chooser

_STATIC = (  # tensors that outlive a pass, by attribute; what `hold` keeps is apart
    "token_buffer", "made", "impossible", "_last_of_prompt", "_filled", "_lengths", "_stops", "_limit",
    "_index", "_ended", "_n_new", "_facts", "noise.seeds", "noise.items", "noise.schedule",
    "counters.passes", "counters.is_bad", "counters.gains", "counters.spent",
)  # fmt: skip


class WindowPass(TokenBuffer):
    """Passes of one run; see `mmaccel.samplers.window.run.WindowRun` for how they are driven.

    Args:
        policy, model, prompt, length, filters, noise, on_step: as in `WindowRun`.
        widest: largest width there will be.
        drafts: a draft source.

    Attributes:
        runner: what carries passes out.
        noise: what passes draw with: the numbers given for the rows, in the run's own tensors.
        stats: counted so far; `stats.passes` numbers the next pass.
        tally: counted so far on the device; `tally.passes` numbers the next pass.
    """

    def __init__(
        self,
        policy: Policy,
        model: TokenModel,
        prompt: Prompt,
        length: int,
        *,
        params: SamplingParams,
        noise: Noise,
        on_step: OnStep | None,
        widest: int,
        drafts: str,
    ) -> None:
        self.runner = runner_of(model)
        key = make_graph_key(
            self.runner, policy, model, prompt, length, params, widest=widest, drafts=drafts,
            has_callback=on_step is not None, is_refilled=self.is_refilled,
        )  # fmt: skip
        extent = None if key is None else key.room
        is_static, size = self.runner.is_static, model.vocab_size
        super().__init__(prompt, size, length, widest, drafts, is_static, extent)
        self.model, self.params, self.noise, self.on_step = model, params, noise, on_step
        self.impossible = params.impossible(model.vocab_size)
        self.stats = Stats(
            policy=repr(policy),
            exactness=policy.exactness,
            branches=prompt.branches,
        )
        capacity = self.extent.slots + self.runner.sync_every
        self.counters = RunCounters(prompt.batch, capacity, self.made.device)
        self._lengths, self._stops = prompt.lengths, prompt.stop_tokens
        self._limit = self.made.new_full((), length)
        self._index = torch.arange(widest, device=self.made.device)
        self._ended = torch.zeros_like(self.made, dtype=torch.bool)
        self._n_new = torch.zeros_like(self.made)  # tokens of the last pass, for `on_step`
        self._facts = self.made.new_zeros(4)  # what the host looks at
        buffers = self.runner.load(key, self.static_inputs() if is_static else {})
        if buffers is not None:
            self._use(buffers)

    def static_inputs(self) -> dict[str, Tensor]:
        """Tensors that outlive a pass, by name, with the numbers that the run begins with."""
        found = {name: attrgetter(name)(self) for name in _STATIC}
        return {name: value for name, value in found.items() if value is not None}

    def _use(self, buffers: StaticBuffers) -> None:
        """Go on with static buffers; what the last pass of another run left in them is ignored."""
        self.noise = Noise(self.noise.seeds, self.noise.items)  # the caller's stays as it is
        for name, value in buffers.inputs.items():
            owner, _, attribute = name.rpartition(".")
            vars(attrgetter(owner)(self) if owner else self)[attribute] = value
        self.held_state = buffers.state

    def forward(self) -> Tensor:
        """One pass over the window.

        Returns:
            Scores `[B, W, V]` float32 of the target law at each slot (see `SamplingParams.apply`).
        """
        scores = self._filter(self.logits(), slice(None))
        self._peak = scores.amax(-1)  # [B, W]
        self.hold("last scores", scores[:, -1].clone())  # a view would keep the whole window's
        return scores

    def logits(self) -> Tensor:
        """One pass over the window, raw: `[R, W, V]` of all branches. `note` is owed afterwards."""
        start = self._lengths - 1 + self.made.repeat(self.prompt.branches)  # [R]
        return self._pass(self.window_inputs(self.columns - 1), start)

    def note(self, logits: Tensor, peak: Tensor) -> None:
        """What `forward` notes of its scores, where a kernel made none.

        Args:
            logits: of `logits()`.
            peak: `[B, W]`, the largest score of every slot after all filters.
        """
        self._peak = peak
        if self.source == "neighbour":  # the only one that looks at them
            self.hold("last scores", self._filter(logits[:, -1:], slice(-1, None))[:, 0])

    def _filter(self, logits: Tensor, part: slice) -> Tensor:
        """Scores of the target law at a part of the window's slots."""
        columns, slots = self.columns[:, part], self.slots[:, part]
        return self.params.apply(
            logits, self.prompt.branches, self.token_buffer, columns, slots, self.prompt.layout
        )

    def spend(self, variation: Tensor) -> None:
        """Total variation `[B, W-1]` that judging each draft slot costs (relaxed policies).

        `commit` charges the slots whose tokens it keeps.
        """
        self.hold("variation", variation)

    def accept(self, tokens: Tensor, n_kept: Tensor) -> None:
        """Keep the first `n_kept` tokens of each row; the rest of the window stands as drafts.

        Args:
            tokens: `[B, W]` int64, the window's new contents.
            n_kept: `[B]` int64 in 1..W.
        """
        self.token_buffer.scatter_(1, self.columns, torch.where(self._ended[:, None], 0, tokens))
        n_new = torch.minimum(n_kept, self._limit - self.made).masked_fill(self._ended, 0)
        if self._stops is not None:
            n_new, stopped = cut_at_stop(tokens, n_new, self._stops)
            self._ended |= stopped
        is_kept = self._index[: self.width] < n_new[:, None]  # [B, W]
        bad = (self._peak - self._peak != 0) & is_kept  # NaN and infinity leave NaN
        self.counters.is_bad |= bad.any(1)
        self._filled.copy_(self.columns[:, -1] + 1)
        self.made += n_new
        self._ended |= self.made >= self._limit
        if self.on_step is None:
            self.count(n_new)
        else:
            self._n_new.copy_(n_new)

    def prefill(self) -> None:
        """One pass over the prompt without its last token."""
        tokens = self.prompt.tokens
        self.runner.reserve(self.model, tokens.shape[0], self.extent.positions)
        if tokens.shape[1] > 1:
            began = time.perf_counter()
            start = self.prompt.lengths.new_zeros(1).expand_as(self.prompt.lengths)
            self.model.prefill(tokens[:, :-1].clamp(min=0), start)
            self.stats.forward_seconds += time.perf_counter() - began
            self.stats.prefill_passes += 1
            self.stats.tokens_processed += tokens[:, :-1].numel()

    def restart(self, places: Tensor, prompt: Prompt) -> None:
        """Begin anew in some places; see `TokenBuffer.restart`. Their prompts are fed elsewhere."""
        super().restart(places, prompt)
        self._lengths.copy_(prompt.lengths)
        self._ended[places] = False
        self.counters.restart(places)

    def keep(self, places: Tensor, prompt: Prompt) -> None:
        """Go on with some places alone; see `TokenBuffer.keep`."""
        super().keep(places, prompt)
        self._lengths, self._ended = prompt.lengths, self._ended[places]
        self._n_new, self.noise = self._n_new[places], self.noise.rows(places)
        self.counters.keep(places)

    def ended(self) -> list[bool]:
        """Which rows have ended. Cost: one host synchronisation."""
        found: list[bool] = self._ended.tolist()
        return found

    def row(self, place: int, row: int) -> FinishedRow:
        """What was made in a place, where that row stood. Cost: some host synchronisations."""
        made = int(self.made[place])
        tokens = self.token_buffer[place, self.origin : self.origin + made].clone()
        gains, variation = self.counters.row(place)
        return FinishedRow(row, tokens, len(gains), count_gains(gains), variation)

    def _pass(self, tokens: Tensor, start: Tensor) -> Tensor:
        began = time.perf_counter()
        logits = self.model.forward(tokens, start)
        self.stats.forward_seconds += time.perf_counter() - began
        return logits

    def count(self, n_new: Tensor) -> None:
        """Count a pass in which rows gained `n_new` `[B]`, and note what the host has to know."""
        self.counters.count(n_new, self.held("variation"))
        wanted = (self._limit - self.made).masked_fill(self._ended, 0)  # [B]
        facts = (
            wanted.amax(),
            (wanted > 0).sum(),
            self.made.sum(),
            self.counters.is_bad.any().long(),
        )
        self._facts.copy_(torch.stack(facts))


class WindowRun(WindowPass):
    """One decoding run of B rows; a sampler drives it while `width` is not 0.

    A sampler hands `turn` what a pass is, in which it calls, in this order: `propose`, `settle`,
    `forward`, `advance`; at the end `generation`. One whose passes cannot be captured calls these
    itself, with `commit` in the place of `advance`.

    Attributes:
        width: W of the next pass; 0 once every row has ended.
        seats: who stands in the places of the run, where the prompt has `ContinuousBatching`; B is then theirs.

    For the rest see `WindowPass`, for the window's contents `TokenBuffer`.

    Raises:
        OptionError, ShapeError: see `check_run`; a draft source that needs a layout the prompt
            lacks.
    """

    def __init__(
        self,
        policy: Policy,
        model: TokenModel,
        prompt: Prompt,
        length: int,
        *,
        params: SamplingParams,
        noise: Noise,
        on_step: OnStep | None,
        window: int | str = 1,
        drafts: str = "left",
    ) -> None:
        check_run(policy, model, prompt, length, noise)
        self.scheduler = (
            None if prompt.batching is None else WindowScheduler(prompt, prompt.batching, noise)
        )
        if self.scheduler is not None:
            self.is_refilled = True
            self.scheduler.join(model)
            prompt, noise = self.scheduler.prompt(), self.scheduler.noise()
        calibration = None
        if window == "adaptive":
            f = params
            law = (f.guidance_scale, f.temperature, f.top_k, f.top_p, f.min_p)
            calibration = find_calibration(model, (prompt.batch, prompt.branches, drafts, *law))
        self.chooser = make_chooser(window, policy.exactness, prompt.batch, length, calibration)
        super().__init__(
            policy,
            model,
            prompt,
            length,
            params=params,
            noise=noise,
            on_step=on_step,
            widest=self.chooser.widest,
            drafts=drafts,
        )
        self._began = time.perf_counter()
        self._n_open = prompt.batch  # rows that have not ended
        self._n_tokens = 0
        self._n_captures = self.runner.captures
        if not self._has_room(self.prefill):
            self.prefill()
        self._aim(length)

    def run_step(self, step_fn: Callable[[], None]) -> None:
        """Carry out a pass, or as many as lie between two looks of the host.

        Args:
            judge: the pass. What it needs of earlier ones it finds in this object; see `hold`.

        Raises:
            NumericsError: if a kept token was drawn from scores that are no law.
        """
        has_begun = self.stats.passes > 0  # the first pass has no earlier one to draft from
        n_passes = self.runner.sync_every if has_begun and self.on_step is None else 1

        def step() -> None:
            if self.runner.is_static or n_passes > 1:  # otherwise it is placed already
                self.place(self.width)
            step_fn()

        is_usual = True
        try:
            for _ in range(n_passes):
                is_usual &= self.runner.run_step(self.width if has_begun else None, step)
        except torch.OutOfMemoryError:
            self.runner.free_memory()  # the next call shall find more room
            raise
        self._sync(n_passes, is_usual)

    def commit(self, tokens: Tensor, n_kept: Tensor) -> None:
        """`advance`, then look: for a pass that is not handed to `turn`.

        Raises:
            NumericsError: if a kept token was drawn from scores that are no law.
        """
        self.accept(tokens, n_kept)
        self._sync(1, True)

    def generation(self) -> Generation:
        """The result, once `width` is 0."""
        if self.scheduler is None:
            tokens = self.token_buffer[:, self.origin : self.origin + self.length]
            index = torch.arange(self.length, device=tokens.device)[None]
            tokens = torch.where(index < self.made[:, None], tokens, 0)
            made, passes = self.made.clone(), self.counters.report(self.stats)
        else:
            tokens, made, passes = self.scheduler.report(self.stats, self.length)
        self.stats.captures = self.runner.captures - self._n_captures
        self.stats.runner, self.stats.runner_reason = self.runner.name, self.runner.reason
        reason = getattr(self.model, "attention_reason", None)
        if reason is not None:
            self.stats.attention = f"the model's own: {reason}" if reason else "window_attention"
        self.stats.seconds = time.perf_counter() - self._began
        self.runner.finish()
        if self.scheduler is not None:
            self.scheduler.leave()
        return Generation(tokens, made, passes, self.stats)

    def _has_room(self, work: Callable[[], None]) -> bool:
        """Do some work; False where there was no memory for it until graphs were dropped."""
        try:
            work()
        except torch.OutOfMemoryError:
            if not self.runner.free_memory():
                raise
            return False
        return True

    def _aim(self, remaining: int) -> None:
        """Place the next window."""
        self._pass_began = time.perf_counter()
        if remaining and self.runner.is_static:  # a graph per width: none for a row's end alone
            remaining = max(remaining, self.chooser.widest)
        self.width = self.chooser.choose(remaining) if remaining else 0
        if not self.runner.is_static:
            self.place(self.width)

    def _sync(self, n_passes: int, is_usual: bool) -> None:
        """See what passes made, and place the next window."""
        self.stats.passes += n_passes
        self.stats.tokens_processed += n_passes * self.width * self._last_of_prompt.shape[0]
        if self.on_step is not None:
            self._tell()
            self.count(self._n_new)
        remaining, n_open, n_tokens, is_bad = self._facts.tolist()  # the one synchronisation
        if is_bad:
            places = [place for place, bad in enumerate(self.counters.is_bad.tolist()) if bad]
            raise invalid_logits(
                tuple(p if self.scheduler is None else self.scheduler.rows[p] for p in places)
            )
        if is_usual:
            seconds = (time.perf_counter() - self._pass_began) / n_passes
            gained = (n_tokens - self._n_tokens) / n_passes
            self.chooser.observe(gained, self._n_open, seconds)
        if self.scheduler is not None and n_open < self.scheduler.n_open:
            if self.scheduler.refill(self):
                remaining = self.length
            n_open, n_tokens = self.scheduler.n_open, int(self.made.sum())
        self._n_open, self._n_tokens = n_open, n_tokens
        self._aim(remaining)

    def _tell(self) -> None:
        """Show the last pass to `on_step`, and end rows where it says so."""
        assert self.on_step is not None
        tokens = self.token_buffer[:, self.origin : self.origin + self.length]
        made, previous = self.made.clone(), self.made - self._n_new
        rows = () if self.scheduler is None else tuple(self.scheduler.rows)
        limit = self.on_step(Progress(tokens, made, previous, self.stats.passes, rows))
        if limit is not None:
            limit = check_limit(limit, made)
            self._ended |= limit <= made
            self.made.copy_(torch.minimum(made, limit))
        self._n_new.copy_((self.made - previous).clamp(min=0))
