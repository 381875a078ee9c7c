"""The window loop: feed a window, let a sampler judge it, keep what it keeps.

This is the host's side; what a pass does on the device is `mmaccel.samplers.window_pass`. Both know
positions, rows, stops and counts, and nothing about probability; the samplers know probability and
nothing about positions. After a pass the host looks once: at the number of slots still wanted, and
at whether a score was NaN.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from mmaccel.contracts import Policy, Prompt, TokenModel
from mmaccel.results import Generation, OnStep, Progress
from mmaccel.samplers.adaptive_width import recall
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.line import check_limit
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.seats import Seats
from mmaccel.samplers.width import make_chooser
from mmaccel.samplers.window_checks import check_run, no_law
from mmaccel.samplers.window_pass import WindowPass


class WindowRun(WindowPass):
    """One decoding run of B rows; a sampler drives it while `width` is not 0.

    A sampler hands `turn` what a pass is, in which it calls, in this order: `propose`, `settle`,
    `forward`, `advance`; at the end `generation`. One whose passes cannot be captured calls these
    itself, with `commit` in the place of `advance`.

    Attributes:
        width: W of the next pass; 0 once every row has ended.
        seats: who stands in the places of the run, where the prompt has `Places`; B is then theirs.

    For the rest see `WindowPass`, for the window's contents `DraftWindow`.

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
        filters: Filters,
        noise: Noise,
        on_step: OnStep | None,
        window: int | str = 1,
        drafts: str = "left",
    ) -> None:
        check_run(policy, model, prompt, length, noise)
        self.seats = None if prompt.places is None else Seats(prompt, prompt.places, noise)
        if self.seats is not None:
            self.is_refilled = True
            self.seats.join(model)
            prompt, noise = self.seats.prompt(), self.seats.noise()
        records = None
        if window == "adaptive":
            f = filters
            law = (f.guidance_scale, f.temperature, f.top_k, f.top_p, f.min_p)
            records = recall(model, (prompt.batch, prompt.branches, drafts, *law))
        self.chooser = make_chooser(window, policy.exactness, prompt.batch, length, records)
        super().__init__(
            policy,
            model,
            prompt,
            length,
            filters=filters,
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

    def turn(self, judge: Callable[[], None]) -> None:
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
            judge()

        is_usual = True
        try:
            for _ in range(n_passes):
                is_usual &= self.runner.run_step(self.width if has_begun else None, step)
        except torch.OutOfMemoryError:
            self.runner.free_memory()  # the next call shall find more room
            raise
        self._look(n_passes, is_usual)

    def commit(self, tokens: Tensor, n_kept: Tensor) -> None:
        """`advance`, then look: for a pass that is not handed to `turn`.

        Raises:
            NumericsError: if a kept token was drawn from scores that are no law.
        """
        self.advance(tokens, n_kept)
        self._look(1, True)

    def generation(self) -> Generation:
        """The result, once `width` is 0."""
        if self.seats is None:
            tokens = self.line[:, self.origin : self.origin + self.length]
            index = torch.arange(self.length, device=tokens.device)[None]
            tokens = torch.where(index < self.made[:, None], tokens, 0)
            made, passes = self.made.clone(), self.tally.report(self.stats)
        else:
            tokens, made, passes = self.seats.report(self.stats, self.length)
        self.stats.captures = self.runner.captures - self._n_captures
        self.stats.runner, self.stats.runner_reason = self.runner.name, self.runner.reason
        reason = getattr(self.model, "attention_reason", None)
        if reason is not None:
            self.stats.attention = f"the model's own: {reason}" if reason else "window_attention"
        self.stats.seconds = time.perf_counter() - self._began
        self.runner.finish()
        if self.seats is not None:
            self.seats.leave()
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

    def _look(self, n_passes: int, is_usual: bool) -> None:
        """See what passes made, and place the next window."""
        self.stats.passes += n_passes
        self.stats.fed += n_passes * self.width * self._last_of_prompt.shape[0]
        if self.on_step is not None:
            self._tell()
            self.count(self._n_new)
        remaining, n_open, n_tokens, is_bad = self._facts.tolist()  # the one synchronisation
        if is_bad:
            places = [place for place, bad in enumerate(self.tally.is_bad.tolist()) if bad]
            raise no_law(tuple(p if self.seats is None else self.seats.rows[p] for p in places))
        if is_usual:
            seconds = (time.perf_counter() - self._pass_began) / n_passes
            gained = (n_tokens - self._n_tokens) / n_passes
            self.chooser.observe(gained, self._n_open, seconds)
        if self.seats is not None and n_open < self.seats.n_open:
            if self.seats.turn_over(self):
                remaining = self.length
            n_open, n_tokens = self.seats.n_open, int(self.made.sum())
        self._n_open, self._n_tokens = n_open, n_tokens
        self._aim(remaining)

    def _tell(self) -> None:
        """Show the last pass to `on_step`, and end rows where it says so."""
        assert self.on_step is not None
        tokens = self.line[:, self.origin : self.origin + self.length]
        made, previous = self.made.clone(), self.made - self._n_new
        rows = () if self.seats is None else tuple(self.seats.rows)
        limit = self.on_step(Progress(tokens, made, previous, self.stats.passes, rows))
        if limit is not None:
            limit = check_limit(limit, made)
            self._ended |= limit <= made
            self.made.copy_(torch.minimum(made, limit))
        self._n_new.copy_((self.made - previous).clamp(min=0))
