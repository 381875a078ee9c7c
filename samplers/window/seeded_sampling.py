"""Draws with frozen noise over a window: in separate steps, or as one kernel.

Both give the same tokens. The kernel (`mmaccel.kernels.sample`) reads the logits once and writes a
token a slot; the steps make noise and scores of the whole window, which a prefix-dependent
processor needs.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mmaccel.errors import MissingBackendError
from mmaccel.kernels import dispatch
from mmaccel.kernels.sample import Settings, sample_frozen
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.window.run import WindowPass


class FrozenDraws(Protocol):
    """Draws of one pass."""

    def guess(self, law: Tensor) -> Tensor:
        """Drafts `[B, W-1]` int64 from unnormalised log-laws `[B, 1 or W-1, V]`; a draft drawn with
        the slot's own noise meets the slot's token more often.
        """

    def tokens(self) -> Tensor:
        """Run the pass; tokens `[B, W]` int64 from the target law of every slot."""


def open_draws(run: WindowPass, noise: Noise) -> FrozenDraws:
    """Draws of the next pass: by the kernel where it can run and nothing needs the scores.

    Raises:
        MissingBackendError: MMACCEL_KERNELS=triton, and a processor needs them.
    """
    if not dispatch.takes("sample", run.made.device.type):
        return StepwiseDraws(run, noise)
    if run.params.processor is None:
        return FusedDraws(run, noise)
    if dispatch.mode() == "triton":
        raise MissingBackendError(
            f"{dispatch.VARIABLE}=triton: expected scores that no logits processor looks at, as "
            f"the sample kernel never writes them, received {run.params.processor!r}; or set "
            f"{dispatch.VARIABLE}=auto"
        )
    return StepwiseDraws(run, noise)


class StepwiseDraws:
    """Noise, scores and argmax one after the other."""

    def __init__(self, run: WindowPass, noise: Noise) -> None:
        self._run = run
        self._frozen = noise.frozen(run.slots, run.vocab_size, run.params.temperature)

    def guess(self, law: Tensor) -> Tensor:
        """See `FrozenDraws.guess`."""
        found: Tensor = (law + self._frozen[:, :-1]).argmax(-1)
        return found

    def tokens(self) -> Tensor:
        """See `FrozenDraws.tokens`."""
        found: Tensor = (self._run.forward() + self._frozen).argmax(-1)
        return found


class FusedDraws:
    """Guidance, filters, noise and argmax as one kernel."""

    def __init__(self, run: WindowPass, noise: Noise) -> None:
        self._run, self._noise = run, noise
        self._purpose = torch.zeros((), dtype=torch.int64, device=run.made.device)  # frozen

    def guess(self, law: Tensor) -> Tensor:
        """See `FrozenDraws.guess`."""
        run, noise = self._run, self._noise
        slots = run.slots[:, :-1]
        if not slots.shape[1]:
            return slots
        settings = Settings(temperature=1.0 if run.params.temperature else 0.0)
        law = law.expand(-1, slots.shape[1], -1)
        key = (noise.seeds, noise.items, slots, self._purpose)
        return dispatch.run(sample_frozen, law, 1, settings, None, *key).tokens

    def tokens(self) -> Tensor:
        """See `FrozenDraws.tokens`."""
        run, noise, layout = self._run, self._noise, self._run.prompt.layout
        f, branches = run.params, run.prompt.branches
        f.check_branches(branches)
        logits = run.logits()  # [R, W, V]
        mask = None if layout is None else layout.allowed(run.slots)
        if mask is not None:
            mask = mask[(None,) * (3 - mask.ndim)]
        forced = None if layout is None else layout.forced(run.slots)
        settings = Settings(f.guidance_scale, 1.0, f.temperature, f.top_k, f.top_p, f.min_p)
        key = (noise.seeds, noise.items, run.slots, self._purpose)
        found = dispatch.run(sample_frozen, logits, branches, settings, mask, *key, forced)
        run.note(logits, found.peak)
        return found.tokens
