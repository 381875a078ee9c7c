"""Speculative Jacobi decoding: drafts from the last pass, accepted by the speculative rule.

SJD: Y. Teng et al., "Accelerating Auto-regressive Text-to-Image Generation with Training-free
Speculative Jacobi Decoding", ICLR 2025 (arXiv 2410.01699), section 3. Coupled redraws: "MC-SJD:
Maximal Coupling Speculative Jacobi Decoding", arXiv 2510.24211, sections 4.1 (maximal) and 4.2
(Gumbel).

A pass gives the target distribution p of every slot. Left to right, a slot's draft is accepted with
probability min(1, p/q), where q is the distribution it was drawn from. The first slot that fails is
redrawn from (p - q)+ and ends the accepted prefix. Later slots remain drafts and are redrawn from
their new p, which becomes their recorded q:

- independent: afresh (SJD);
- maximal: the old draft with probability min(1, p/q), else (p - q)+, so that as few drafts as
  possible change;
- gumbel: argmax of log p plus the slot's frozen noise, so that an unchanged p repeats its token.

Under every coupling a draft, given all slots on its left, is distributed as the recorded q. The
acceptance rule needs nothing else, so the output is distributed as that of `Autoregressive`.

Departures: the recorded distribution of an accepted draft is the new p (the released code uses the
stale one); residuals are not filtered again; a new slot's random draft is recorded with its uniform
distribution, not as one-hot; tokens that the layout forces are drafted as themselves; every row
proceeds at its own pace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.kernels import dispatch
from mmaccel.kernels.acceptance import Rule, exact_rule, follow, redraw, verify
from mmaccel.kernels.couple import couple
from mmaccel.kernels.sample import argmax
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.acceptance import (
    Coupling,
    check_coupling,
    count_leading,
    draw,
    is_kept,
    one_hot,
)
from mmaccel.samplers.drafting.contract import DraftSource
from mmaccel.samplers.window.policy import WindowPolicy
from mmaccel.samplers.window.run import WindowRun


@dataclass(frozen=True)
class SpeculativeJacobi(WindowPolicy):
    """SJD and MC-SJD: the distribution of `Autoregressive`, several tokens a pass.

    Args:
        window: tokens processed per pass.
        coupling: how slots after the first rejection are redrawn.
        drafts: where drafts come from, as in `Jacobi`; "auto" and "coarse" may change the tokens,
            as every draft source does under this policy.

    Memory: distributions `[B, window, V]` float32 of the last pass are stored until the next one.
    """

    window: int = 32
    coupling: Coupling = "maximal"
    drafts: str | DraftSource = "neighbour"

    exactness: ClassVar[Exactness] = "distribution"
    is_capturable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_coupling(self.coupling)

    def decode(self, run: WindowRun) -> Generation:
        return iterate(run, self.coupling, exact_rule)


def iterate(run: WindowRun, coupling: str, rule: Rule) -> Generation:
    """The loop shared by the exact and the relaxed rule.

    Args:
        run: a fresh run.
        coupling: how drafts after the first rejection are redrawn; always exact, whatever the
            rule.
        rule: decides which drafts are accepted.

    Returns:
        The finished generation.
    """
    drafter = run.drafter
    p_held, first_held = run.state.declare("p_target"), run.state.declare("first slot")
    is_fused = (rule, coupling) == (exact_rule, "maximal")
    is_fused = is_fused and dispatch.takes("couple", run.buffer.tokens.device.type)
    compute = run.backend.run

    def step_fn() -> None:
        slots = run.buffer.slots
        fresh = run.fresh_noise()
        drafts, p_draft = _drafts(run, fresh.drafts[:, :-1], p_held.value, first_held.value)
        noise = run.frozen_noise() if drafter.source.corrects else None
        if noise is not None:
            drafts, p_own = drafter.correct(run, drafts, noise[:, :-1], p_draft)
            assert p_own is not None
            p_draft = p_own
        scores = run.forward()  # [B, W, V]
        run.observe(noise)
        coins = fresh.coins[:, :-1]
        spent = None
        if is_fused:
            coupled = dispatch.run(couple, scores, p_draft, drafts, coins, fresh.redraws)
            p_target = coupled.p_target
            tokens = coupled.verified
            accepted = coupled.kept
        else:
            p_target = scores.softmax(-1)
            accepted, spent = compute(verify, rule, p_target[:, :-1], p_draft, drafts, coins)
            index = torch.arange(run.width, device=drafts.device)[None]
            last = count_leading(accepted)[:, None]  # the slot that is redrawn, or the bonus slot
            keeps = accepted
            if coupling == "maximal":
                if spent is not None:
                    remains = compute(is_kept, p_target[:, :-1], p_draft, drafts, coins)
                    keeps = torch.where(index[:, :-1] <= last, accepted, remains)
                tokens = compute(redraw, p_target, p_draft, drafts, keeps, fresh.redraws)
            elif coupling == "gumbel":
                keeps = index[:, :-1] != last
                tokens = compute(redraw, p_target, p_draft, drafts, keeps, fresh.redraws)
                frozen = compute(argmax, scores + run.frozen_noise())
                tokens = torch.where(index <= last, tokens, frozen)
            else:
                keeps = index[:, :-1] < last
                tokens = compute(redraw, p_target, p_draft, drafts, keeps, fresh.redraws, last)
        p_held.hold(p_target)
        first_held.hold(slots[:, :1])
        run.accept(tokens, accepted, spent)

    return run.run(step_fn)


def _drafts(
    run: WindowRun, uniforms: Tensor, p_last: Tensor | None, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Drafts `[B, W-1]` of the window and the distributions `[B, W-1, V]` they were drawn from.

    Args:
        run: the run.
        uniforms: `[B, W-1]`, with which new drafts are drawn.
        p_last: `[B, W', V]`, target distributions of the last pass; None before the first.
        first: `[B, 1]` int64, the first slot of the last pass.
    """
    slots = run.buffer.slots[:, :-1]
    found = run.propose()
    guess = found.tokens
    if guess is None:
        assert found.scores is not None
        p_new = found.scores.softmax(-1)  # [B, 1 or W-1, V]
        guess = draw(p_new, uniforms)
        p_draft = p_new.expand(-1, slots.shape[1], -1)
    elif found.distribution is None:
        p_draft = one_hot(guess, run.vocab_size)
    else:
        p_draft = found.distribution
    if p_last is not None and first is not None:  # predicted drafts were drawn from these
        buffer = run.buffer
        moved = buffer.slots[:, 0] - first[:, 0]
        n_predicted = buffer.filled - buffer.columns[:, 0]
        p_draft = run.backend.run(follow, p_last, moved, n_predicted, p_draft)
    drafts = run.write_drafts(guess)
    forced = run.rows.forced()
    if forced is not None:
        p_draft = torch.where((forced >= 0)[..., None], one_hot(drafts, run.vocab_size), p_draft)
    return drafts, p_draft
