"""RunParts: what a window run consists of, opened in the order in which one needs another."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from mmaccel.checks import check_kind
from mmaccel.contracts import Prompt, TokenModel
from mmaccel.kernels.dispatch import Backend
from mmaccel.results import OnStep, Stats
from mmaccel.samplers.drafting.contract import Drafter, Frontier
from mmaccel.samplers.noise import Fresh, Noise, Stream
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.passes import RunPasses
from mmaccel.samplers.window.rolling_noise import NoiseAhead, PassNoise
from mmaccel.samplers.window.rows import RunRows
from mmaccel.samplers.window.scheduler import WindowScheduler
from mmaccel.samplers.window.step_runner import StepRunner
from mmaccel.samplers.window.steps import RunSteps, StaticPart
from mmaccel.samplers.window.window_size import open_chooser

if TYPE_CHECKING:
    from mmaccel.samplers.window.policy import WindowPolicy
    from mmaccel.samplers.window.run import WindowRun


class RunParts(StaticPart):
    """The parts of one decoding run of B rows; arguments as in `mmaccel.policies.Policy.sample`."""

    static = ("impossible", "frozen")

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
        self.began = time.perf_counter()
        run = cast("WindowRun", self)
        source = policy.draft_source()
        runner: StepRunner = model.setup.runner or StepRunner()
        self.scheduler: WindowScheduler | None = None  # without `ContinuousBatching`
        if prompt.batching is not None:
            self.scheduler = WindowScheduler(prompt, noise, model, policy, runner)
            prompt = self.scheduler.prompt()
            noise = self.scheduler.noise()
        device = prompt.tokens.device
        self.policy = policy
        self.model = model
        self.prompt = prompt  # of the B rows that are decoded now, as `noise`
        self.length = length
        self.params = params
        self.noise = noise
        self.on_step = on_step
        self.runner = runner
        self.vocab_size = model.vocab_size
        self.impossible = params.impossible(model.vocab_size)  # [S] ids that need no draft, or None
        # what kernels are told that frozen noise is for
        self.frozen = torch.full((), Stream.FROZEN, dtype=torch.int64, device=device)
        self.stats = Stats(
            policy=repr(policy), exactness=policy.exactness, branches=prompt.branches
        )
        self.steps = RunSteps(runner, device)
        self.last_scores = self.steps.declare("last scores")  # [B, V], of the right-most slot
        self._variation = self.steps.declare("variation")  # [B, W-1], what the last pass has spent
        # operations in torch, in Triton, or row by row on the host
        self.backend = Backend(device.type, prompt.batch, reads_back=not runner.is_static)
        self.drafter = check_kind(
            f"{type(source).__name__}.open", source.open(run), Drafter, "return a Drafter(self)"
        )
        if "drafts" in vars(policy):  # a field, which the caller may have chosen
            self.stats.drafts = self.drafter.source.name or repr(self.drafter.source)
        if self.drafter.note:
            self.stats.notes.append(self.drafter.note)
        n_open = prompt.batch
        if self.scheduler is not None:
            self.scheduler.register(model)
            n_open = self.scheduler.n_open
        self.chooser = open_chooser(run)
        self.chooser.go_on(n_open, 0)
        self.steps.open(run)
        self.rows = RunRows(run, n_open)
        self.passes = RunPasses(run)
        make_noise = self.backend.choose(PassNoise, NoiseAhead)
        widest = self.chooser.widest
        self.pass_noise = make_noise(self.vocab_size, params.temperature, widest, length)
        if runner.is_static:
            self.steps.load(run)

    def frontier(self) -> Frontier:
        """What is known where the window's drafts begin."""
        rows = self.rows
        return Frontier(
            rows.tokens,
            rows.origin,
            rows.filled,
            rows.slots[:, :-1],
            self.last_scores.value,
            self.prompt.layout,
            self.vocab_size,
            self.impossible,
            None if self.scheduler is None else rows.n_generated == 0,
            self.prompt.n_shown,
        )

    def frozen_noise(self) -> Tensor:
        """Frozen Gumbel noise `[B, W, V]`, at temperature 0 `[B, W, 1]`; nobody writes to it."""
        return self.pass_noise.frozen(self.noise, self.rows.slots)

    def fresh_noise(self) -> Fresh:
        """Uniforms of this pass; see `Noise.fresh`."""
        return self.pass_noise.fresh(self.noise, self.rows.slots, self.rows.passes)
