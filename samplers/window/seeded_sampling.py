"""Draws with frozen noise over a window: in separate steps, or as one kernel.

Both give the same tokens. The kernel (`mmaccel.kernels.sample`) reads the logits once; separate
steps write noise and scores of the whole window, which a logits processor needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn.functional import pad

from mmaccel.errors import MissingBackendError
from mmaccel.kernels import dispatch
from mmaccel.kernels.sample import Settings, argmax, sample_frozen
from mmaccel.samplers.window.run import WindowRun
from mmaccel.samplers.window.spread_codes import SpreadCodes


def choose_draws(run: WindowRun) -> Callable[[WindowRun], Draws]:
    """What makes the draws of a run's passes: the kernel, or the separate steps for logits
    processors and rules that no kernel applies (refused under MMACCEL_KERNELS=triton), recorded
    scores, and drafters that read scores.
    """
    without_kernel = run.params.without_kernel
    stepwise: Callable[[WindowRun], Draws] = StepwiseDraws
    if run.params.is_spread:
        stepwise = partial(StepwiseDraws, codes=SpreadCodes(run))
    is_read = run.passes.recording is not None or run.drafter.source.reads_scores
    if is_read or not dispatch.uses_triton(run.rows.tokens.device.type):
        return stepwise
    if run.params.processor is None and not without_kernel:
        return FusedDraws
    if dispatch.mode() != "triton":
        return stepwise
    if without_kernel:
        raise MissingBackendError(
            f"{dispatch.VARIABLE}=triton: expected rules that the sample kernel applies, received "
            f"{', '.join(without_kernel)}; set {dispatch.VARIABLE}=auto"
        )
    raise MissingBackendError(
        f"{dispatch.VARIABLE}=triton: expected no logits processor, as the sample kernel "
        f"never writes the scores it reads, received {run.params.processor!r}; set "
        f"{dispatch.VARIABLE}=auto"
    )


def open_draws(run: WindowRun) -> Draws:
    """Draws of the next pass; a policy calls `choose_draws` once a run to save time."""
    return choose_draws(run)(run)


def draft_window(run: WindowRun, draws: Draws) -> Tensor:
    """The drafts `[B, W-1]` int64 of the next pass, which the token buffer then holds."""
    drafts = run.propose()
    guess = drafts.tokens
    if guess is None:
        assert drafts.scores is not None
        guess = draws.drafts(drafts.scores)
    return draws.redraft(run.write_drafts(guess))


class StepwiseDraws:
    """Noise, scores and argmax one after the other."""

    def __init__(self, run: WindowRun, codes: SpreadCodes | None = None) -> None:
        self._run = run
        self._codes = codes
        self.noise = run.frozen_noise()  # [B, W, V], or [B, W, 1]

    def drafts(self, scores: Tensor) -> Tensor:
        """Drafts `[B, W-1]` from scores `[B, 1 or W-1, V]` with the noise of their slots."""
        noise = self.noise[:, :-1]
        n_new = self._run.rows.n_new_drafts()
        n_predicted = noise.shape[1] - n_new
        if scores.shape[1] > 1:
            scores = scores[:, n_predicted:]
        drafts = self._run.backend.run(argmax, scores + noise[:, n_predicted:])
        return pad(drafts, (n_predicted, 0)) if n_predicted else drafts  # nobody reads the others

    def redraft(self, drafts: Tensor) -> Tensor:
        drafter = self._run.drafter
        if not drafter.source.corrects:
            return drafts
        return drafter.correct(self._run, drafts, self.noise[:, :-1])[0]

    def tokens(self) -> Tensor:
        """Run the forward pass; tokens `[B, W]` int64 from each slot's target distribution."""
        run = self._run
        noise = self.noise
        scores = run.forward()
        tokens = run.backend.run(argmax, scores + noise)
        if self._codes is not None:
            tokens = self._codes.choose(run, scores, tokens)
        run.observe(noise)
        return tokens


class FusedDraws:
    """Guidance, filters, noise and argmax as one kernel."""

    def __init__(self, run: WindowRun) -> None:
        self._run = run

    def drafts(self, scores: Tensor) -> Tensor:
        run = self._run
        slots = run.rows.slots[:, :-1]
        if not slots.shape[1]:
            return slots
        settings = Settings(temperature=1.0 if run.params.temperature else 0.0)
        scores = scores.expand(-1, slots.shape[1], -1)
        key = (run.noise.seeds, run.noise.items, slots, run.frozen)
        return dispatch.run(sample_frozen, scores, 1, settings, None, *key).tokens

    def redraft(self, drafts: Tensor) -> Tensor:
        """The same drafts: where they are corrected there are `StepwiseDraws`."""
        return drafts

    def tokens(self) -> Tensor:
        run = self._run
        params = self._run.params
        slots = run.rows.slots
        layout = run.prompt.layout
        branches = run.prompt.branches
        params.check_branches(branches)
        logits = run.passes.logits()  # [R, W, V]
        mask = None if layout is None else layout.allowed(slots)
        if mask is not None:
            mask = mask[(None,) * (3 - mask.ndim)]
        forced = None if layout is None else layout.forced(slots)
        settings = Settings(
            params.guidance_scale, 1.0, params.temperature, params.top_k, params.top_p, params.min_p
        )
        key = (run.noise.seeds, run.noise.items, slots, run.frozen)
        last = None
        if run.passes.reads_last and forced is None and not settings.cuts:
            last = run.last_scores.room((len(slots), run.vocab_size))
        sampled = dispatch.run(sample_frozen, logits, branches, settings, mask, *key, forced, last)
        run.passes.record(logits, sampled.peak, last)
        return sampled.tokens


Draws = StepwiseDraws | FusedDraws
"""Draws of one pass."""
