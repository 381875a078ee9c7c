"""Speculative Jacobi decoding: drafts from the last pass, accepted by the speculative rule.

SJD: Y. Teng et al., "Accelerating Auto-regressive Text-to-Image Generation with Training-free
Speculative Jacobi Decoding", ICLR 2025 (arXiv 2410.01699), section 3. Coupled redraws: "MC-SJD",
arXiv 2510.24211, sections 4.1 and 4.2 (maximal and Gumbel).

A pass gives the target distribution p of every slot. Left to right, a slot's draft is accepted with
probability min(1, p/q), where q is the distribution it was drawn from. The first slot that fails is
redrawn from (p - q)+ and ends the accepted prefix. Later slots are redrawn from their new p, the
next q, so that a draft given its left is distributed as its q:

- independent: afresh (SJD);
- maximal: the old draft with probability min(1, p/q), else (p - q)+, so that fewest change;
- gumbel: argmax of log p plus the slot's frozen noise, so that an unchanged p repeats its token.

SJD-VP ("Speculative Jacobi Decoding with Verification Prediction", arXiv 2603.27115): `rising`
extrapolates log p from the last two passes, and drafts are coupled to, and recorded with, what this
gives. SJD++ (Y. Teng et al., arXiv 2512.07503) keeps confident drafts behind a rejection; the
maximal coupling keeps as many drafts as any exact rule can. Block verification: arXiv 2403.10444.

Departures: the recorded distribution of an accepted draft is the new p (the released code uses the
stale one); residuals are not filtered again; a new slot's random draft is recorded with its uniform
distribution, not as one-hot; tokens that the layout forces are drafted as themselves; every row
proceeds at its own pace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.errors import OptionError
from mmaccel.kernels import dispatch
from mmaccel.kernels.acceptance import Rule, exact_rule, follow, redraw, verify
from mmaccel.kernels.couple import couple
from mmaccel.kernels.sample import argmax
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.acceptance import (
    Coupling,
    count_leading,
    is_kept,
)
from mmaccel.samplers.drafting.contract import DraftSource
from mmaccel.samplers.noise import Fresh
from mmaccel.samplers.trees.contract import TreeShape
from mmaccel.samplers.trees.coupled_walk import CoupledWalk
from mmaccel.samplers.trees.siblings.contract import SiblingRule
from mmaccel.samplers.trees.siblings.rsd import RSD
from mmaccel.samplers.trees.walk import find_walked
from mmaccel.samplers.window.block_verification import (
    Verification,
    verify_block,
)
from mmaccel.samplers.window.draft_record import DraftRecord
from mmaccel.samplers.window.policy import WindowPolicy
from mmaccel.samplers.window.run import WindowRun

Rest = Callable[[Tensor, Tensor], Tensor]
"""(p_target, p_draft `[B, 1, V]`) -> weights `[B, 1, V]` of the token that replaces a draft."""

_MOST_CHANGE = 2.0  # nats; where a filter has moved, the change of log p says little


@dataclass(frozen=True)
class SpeculativeJacobi(WindowPolicy):
    """SJD and MC-SJD: the distribution of `Autoregressive`; old drafts are kept by the speculative
    rule.

    Args:
        window: tokens processed per pass.
        coupling: how slots after the first rejection are redrawn.
        drafts: where drafts come from, as in `Jacobi`; every source may change the tokens.
        tree: what a pass verifies beside the window's chain of drafts, a `Comb` or a `Sequoia`;
            None: nothing. It asks for drafts that are drawn for it: "coarse", "auto" with a coarse
            model, a `Coarse`, a `DraftModel`.
        siblings: how several drafts of one slot are drawn, and which one is accepted.
        rising: how far drafts follow the change of log-probabilities between passes; 0: not.
        verification: "token", one draft after the other, or "block", all drafts of a window
            together, which accepts more; for independent drafts that nothing corrects.

    Memory: distributions `[B, window, V]` float32 of the last pass are stored until the next one.
    Loses: where the same seed must give the plain loop's image; "independent" redraws all that is
    far to the right, so that wide windows buy little; `rising` on `scenes` (4.9 tokens a pass fall
    to 4.1 at 0.3).
    Figures: `scenes`, window 32, guidance 1: 4.7 tokens a pass ("maximal"), 4.6 ("gumbel"), 2.9
    ("independent", 3.6 with "block"); `Jacobi` 4.5.
    """

    window: int = 32
    coupling: Coupling = "maximal"
    drafts: str | DraftSource = "neighbour"
    tree: TreeShape | None = None
    siblings: SiblingRule = within(RSD(), hint="give one such as mmaccel.RSD()")
    rising: float = within(0.0, 0, 10, "0.5 is usual, 0 does not extrapolate")
    verification: Verification = "token"

    exactness: ClassVar[Exactness] = "distribution"
    is_capturable: ClassVar[bool] = True
    tree_ways: ClassVar[frozenset[str]] = frozenset({"drawn"})  # why: see `coupled_walk`
    tree_remedy: ClassVar[str] = "drafts='coarse' with a Comb or a Sequoia"

    def __post_init__(self) -> None:
        super().__post_init__()
        is_fresh = self.coupling == "independent" and not self.draft_source().corrects
        if self.verification == "block" and not is_fresh:
            raise OptionError(
                "verification: expected coupling='independent' and drafts that nothing corrects "
                "for 'block', as it looks at later drafts, which therefore must not be kept, "
                f"received coupling={self.coupling!r} and drafts={self.drafts!r}; choose 'token'"
            )
        if self.tree is not None and (self.rising or self.verification == "block"):
            raise OptionError(
                "tree: expected rising=0 and verification='token' with it, received "
                f"rising={self.rising} and verification={self.verification!r}; leave one out"
            )

    def __repr__(self) -> str:
        shown = f"window={self.window!r}, coupling={self.coupling!r}, drafts={self.drafts!r}"
        if self.tree is not None:
            shown += f", tree={self.tree!r}, siblings={self.siblings!r}"
        if self.rising:
            shown += f", rising={self.rising!r}"
        if self.verification != "token":
            shown += f", verification={self.verification!r}"
        return f"SpeculativeJacobi({shown})"

    def decode(self, run: WindowRun) -> Generation:
        tree = find_walked(run)
        walk = None
        if tree is not None:
            plan = tree.plan(run.chooser.widest)
            walk = CoupledWalk(run, plan, self.siblings, self.coupling)
        is_joint = self.verification == "block"
        return iterate(run, self.coupling, exact_rule, walk, rising=self.rising, is_joint=is_joint)


def iterate(
    run: WindowRun,
    coupling: str,  # how drafts after the first rejection are redrawn; exact, whatever the rule
    rule: Rule,  # decides which drafts are accepted
    walk: CoupledWalk | None = None,  # of passes that cover trees, under the exact rule
    *,
    rising: float = 0.0,
    is_joint: bool = False,  # verify all drafts of a window together, instead of by the rule
    rest: Rest | None = None,  # replaces the first draft that the rule rejects; None: (p - q)+
) -> Generation:
    """The loop shared by the exact and the relaxed rules, on a fresh run."""
    record = DraftRecord(run)
    passed_held = run.steps.declare("p_passed") if rising else None
    is_fused = (rule, coupling, rising) == (exact_rule, "maximal", 0) and not is_joint
    is_fused = is_fused and dispatch.uses_triton(run.rows.tokens.device.type)
    compute = run.backend.run

    def step_fn() -> None:
        fresh = run.fresh_noise()
        drawn = record.draft(fresh)
        tree = None if walk is None else walk.grow(drawn)
        if walk is not None and tree is not None:
            walk.verify(tree, drawn.noise, fresh, record)
            return
        drafts = drawn.tokens
        p_draft = drawn.p_draft
        scores = run.forward()  # [B, W, V]
        run.observe(drawn.noise)
        coins = fresh.coins[:, :-1]
        spent = None
        if is_fused:
            coupled = dispatch.run(couple, scores, p_draft, drafts, coins, fresh.redraws)
            p_target = coupled.p_target
            tokens = coupled.verified
            accepted = coupled.kept
        else:
            p_target = scores.softmax(-1)
            p_verified = p_target
            if is_joint:
                accepted, p_verified = verify_block(
                    p_target, p_draft, drafts, coins, run.rows.is_over(run.rows.slots)
                )
            else:
                accepted, spent = compute(verify, rule, p_target[:, :-1], p_draft, drafts, coins)
            index = torch.arange(run.width, device=drafts.device)[None]
            last = count_leading(accepted)[:, None]  # the slot that is redrawn, or the bonus slot
            if passed_held is not None:
                passed = passed_held.value
                scores = _extrapolate(run, scores, p_target, passed, record.first, rising)
                passed_held.hold(p_target)  # after it was read: captured steps overwrite it
                is_draft = (index > last)[..., None]
                p_target = torch.where(is_draft, scores.softmax(-1), p_target)
                p_verified = torch.where(is_draft, p_target, p_verified)
            if rest is not None:
                p_verified = _place_rest(rest, p_verified, p_draft, last)
            verified = Verified(scores, p_target, p_verified, accepted, last)
            is_other = is_joint or spent is not None or rising > 0
            tokens = _redraw_window(run, coupling, verified, p_draft, drafts, fresh, is_other)
        record.hold(p_target)
        run.accept(tokens, accepted, spent)

    return run.run(step_fn)


class Verified(NamedTuple):
    """A window after its drafts were verified."""

    scores: Tensor  # [B, W, V], of the distributions that drafts are redrawn from
    p_target: Tensor  # [B, W, V], these distributions
    p_verified: Tensor  # [B, W, V], whose residual replaces the first draft that was rejected
    accepted: Tensor  # [B, W-1] bool
    last: Tensor  # [B, 1] int64, the slot of that draft, or the bonus slot


def _place_rest(rest: Rest, p_target: Tensor, p_draft: Tensor, last: Tensor) -> Tensor:
    """`p_target` `[B, W, V]` with a distribution at `last` whose part beyond q is `rest`. A slot of
    which nothing is left, and the bonus slot, stay as they are.
    """
    n_drafts = p_draft.shape[1]
    if not n_drafts:
        return p_target
    at = last.clamp(max=n_drafts - 1)[..., None].expand(-1, -1, p_target.shape[-1])
    p = p_target.gather(1, at)  # [B, 1, V]
    q = p_draft.gather(1, at)
    residue = rest(p, q)
    is_placed = residue.sum(-1, keepdim=True) > 0
    return p_target.scatter(1, at, torch.where(is_placed, q + residue, p))


def _redraw_window(
    run: WindowRun,
    coupling: str,
    verified: Verified,
    p_draft: Tensor,
    drafts: Tensor,
    fresh: Fresh,
    is_other: bool,
) -> Tensor:
    """The window's next `[B, W]`; `is_other`: another rule or distribution accepted drafts."""
    compute = run.backend.run
    last = verified.last
    index = torch.arange(verified.p_target.shape[1], device=drafts.device)[None]
    if coupling == "maximal":
        keeps = verified.accepted
        if is_other:
            coins = fresh.coins[:, :-1]
            remains = compute(is_kept, verified.p_target[:, :-1], p_draft, drafts, coins)
            keeps = torch.where(index[:, :-1] <= last, keeps, remains)
        return compute(redraw, verified.p_verified, p_draft, drafts, keeps, fresh.redraws)
    if coupling == "gumbel":
        keeps = index[:, :-1] != last
        tokens = compute(redraw, verified.p_verified, p_draft, drafts, keeps, fresh.redraws)
        frozen = compute(argmax, verified.scores + run.frozen_noise())
        return torch.where(index <= last, tokens, frozen)
    keeps = index[:, :-1] < last
    return compute(redraw, verified.p_verified, p_draft, drafts, keeps, fresh.redraws, last)


def _extrapolate(
    run: WindowRun,
    scores: Tensor,
    p: Tensor,
    p_last: Tensor | None,
    first: Tensor | None,
    rising: float,
) -> Tensor:
    """Scores `[B, W, V]` of drafts that follow how log p has changed since the last pass, whose
    distributions were `p_last` `[B, W', V]` from slot `first` `[B, 1]` on.
    """
    if p_last is None or first is None:
        return scores
    rows = run.rows
    moved = rows.slots[:, 0] - first[:, 0]
    n_seen = rows.filled - rows.columns[:, 0]
    before = run.backend.run(follow, p_last, moved, n_seen, p)
    change = (p.log() - before.log()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return scores + rising * change.clamp(-_MOST_CHANGE, _MOST_CHANGE)
