"""What the drafts of a window were drawn from, where drafts are kept from one pass to the next."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mmaccel.kernels.acceptance import follow
from mmaccel.samplers.acceptance import draw, one_hot
from mmaccel.samplers.noise import Fresh
from mmaccel.samplers.window.fresh_drafts import place_forced
from mmaccel.samplers.window.run import WindowRun


class DrawnDrafts(NamedTuple):
    """Drafts of a window."""

    tokens: Tensor  # [B, W-1] int64
    p_draft: Tensor  # [B, W-1, V]: given all slots on its left a draft has this distribution
    noise: Tensor | None  # frozen noise of the window, where the source corrects drafts by it


class DraftRecord:
    """Drafts of a fresh run whose later slots are redrawn from what a pass said of them."""

    def __init__(self, run: WindowRun) -> None:
        self._run = run
        self._p_held = run.steps.declare("p_target")  # [B, W, V], of the last pass
        self._first_held = run.steps.declare("first slot")  # [B, 1] int64, of the last pass

    @property
    def first(self) -> Tensor | None:
        """`[B, 1]` int64, the first slot of the last pass; None before it."""
        return self._first_held.value

    def draft(self, fresh: Fresh) -> DrawnDrafts:
        """Draft the window, with fresh noise of its slots."""
        run = self._run
        drafter = run.drafter
        drafts, p_draft = self._propose(fresh.drafts[:, :-1])
        if not drafter.source.corrects:
            return DrawnDrafts(drafts, p_draft, None)
        noise = run.frozen_noise()
        drafts, p_own = drafter.correct(run, drafts, noise[:, :-1], p_draft)
        assert p_own is not None
        return DrawnDrafts(drafts, p_own, noise)

    def hold(self, p_target: Tensor) -> None:
        """Keep what later slots of the window are redrawn from, `[B, W, V]`; before `accept`."""
        self._p_held.hold(p_target)
        self._first_held.hold(self._run.rows.slots[:, :1])

    def _propose(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Drafts `[B, W-1]` and distributions `[B, W-1, V]`; new ones are drawn with `uniforms`."""
        run = self._run
        slots = run.rows.slots[:, :-1]
        proposed = run.propose()
        guess = proposed.tokens
        if guess is None:
            assert proposed.scores is not None
            p_new = proposed.scores.softmax(-1)  # [B, 1 or W-1, V]
            guess = draw(p_new, uniforms)
            p_draft = p_new.expand(-1, slots.shape[1], -1)
        elif proposed.distribution is None:
            p_draft = one_hot(guess, run.vocab_size)
        else:
            p_draft = proposed.distribution
        p_last, first = self._p_held.value, self._first_held.value
        if p_last is not None and first is not None:  # predicted drafts were drawn from these
            rows = run.rows
            moved = rows.slots[:, 0] - first[:, 0]
            n_predicted = rows.filled - rows.columns[:, 0]
            p_draft = run.backend.run(follow, p_last, moved, n_predicted, p_draft)
        drafts = run.write_drafts(guess)
        return drafts, place_forced(run, p_draft, one_hot(drafts, run.vocab_size))
