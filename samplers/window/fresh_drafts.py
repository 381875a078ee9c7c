"""Drafts that are all new in every pass, and the speculative rule over a chain of them.

Y. Leviathan, M. Kalman, Y. Matias, ICML 2023 (arXiv 2211.17192), algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.samplers.acceptance import draw, is_kept, one_hot, residual
from mmaccel.samplers.noise import Fresh
from mmaccel.samplers.window.block_verification import verify_block
from mmaccel.samplers.window.run import WindowRun


def draft_afresh(run: WindowRun) -> tuple[Tensor, Tensor]:
    """Drafts `[B, W-1]`, and the distributions `[B, W-1, V]` from which they were drawn."""
    run.rows.forget_drafts()
    proposed = run.propose()
    tokens = proposed.tokens
    p_draft = proposed.distribution
    if tokens is None:
        assert proposed.scores is not None
        p_draft = proposed.scores.softmax(-1).expand(-1, run.width - 1, -1)
        tokens = draw(p_draft, run.fresh_noise().drafts[:, :-1])
    drafts = run.write_drafts(tokens)
    certain = one_hot(drafts, run.vocab_size)
    if p_draft is None:
        return drafts, certain
    return drafts, place_forced(run, p_draft, certain)


def place_forced(run: WindowRun, p_draft: Tensor, certain: Tensor) -> Tensor:
    """Distributions of drafts `[B, W-1, V]`, certain where a draft is what its slot must hold."""
    forced = run.rows.forced()
    if forced is None:
        return p_draft
    return torch.where((forced >= 0)[..., None], certain, p_draft)


def verify_chain(
    run: WindowRun, drafts: Tensor, p_draft: Tensor, fresh: Fresh, *, is_joint: bool = False
) -> None:
    """A pass over the window alone; the leading drafts that the rule accepts are generated.
    `is_joint` verifies all drafts together (`block_verification.py`).
    """
    scores = run.forward()
    p_target = scores.softmax(-1)  # [B, W, V]
    run.observe(None)
    coins = fresh.coins[:, :-1]
    p_verified = p_target
    if is_joint:
        accepted, p_verified = verify_block(
            p_target, p_draft, drafts, coins, run.rows.is_over(run.rows.slots)
        )
    else:
        accepted = is_kept(p_target[:, :-1], p_draft, drafts, coins)
    if run.is_retry:  # no draft model has read these drafts
        accepted = torch.zeros_like(accepted)
        p_draft = torch.zeros_like(p_draft)
        p_verified = p_target
    rest = torch.cat([residual(p_verified[:, :-1], p_draft), p_target[:, -1:]], 1)
    redrawn = draw(rest, fresh.redraws)  # [B, W]
    tokens = torch.where(accepted, drafts, redrawn[:, :-1])
    tokens = torch.cat([tokens, redrawn[:, -1:]], 1)
    run.accept(tokens, accepted)
    run.passes.keep_accepted(scores, run.rows.n_new)
