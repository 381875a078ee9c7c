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

from mmaccel.kernels import dispatch
from mmaccel.kernels.acceptance import Rule, exact_rule, redraw, verify
from mmaccel.kernels.couple import couple
from mmaccel.kernels.sample import argmax
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.acceptance import (
    Coupling,
    check_coupling,
    count_leading,
    is_kept,
)
from mmaccel.samplers.drafting.contract import DraftSource
from mmaccel.samplers.trees.contract import TreeShape
from mmaccel.samplers.trees.coupled_walk import CoupledWalk
from mmaccel.samplers.trees.siblings.contract import SiblingRule, check_siblings
from mmaccel.samplers.trees.siblings.rsd import RSD
from mmaccel.samplers.trees.walk import can_walk
from mmaccel.samplers.window.draft_record import DraftRecord
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
        tree: what a pass verifies beside the window's chain of drafts, a `Comb` or a `Sequoia`;
            None: nothing. It asks for drafts that are drawn for it: "coarse", "auto" with a coarse
            model, a `Coarse`, a `DraftModel`.
        siblings: how several drafts of one slot are drawn, and which one is accepted.

    Memory: distributions `[B, window, V]` float32 of the last pass are stored until the next one.
    """

    window: int = 32
    coupling: Coupling = "maximal"
    drafts: str | DraftSource = "neighbour"
    tree: TreeShape | None = None
    siblings: SiblingRule = RSD()

    exactness: ClassVar[Exactness] = "distribution"
    is_capturable: ClassVar[bool] = True
    tree_remedy: ClassVar[str] = "drafts='coarse' with a Comb or a Sequoia"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_coupling(self.coupling)
        check_siblings(self.siblings)

    def __repr__(self) -> str:
        own = f"window={self.window!r}, coupling={self.coupling!r}, drafts={self.drafts!r}"
        if self.tree is not None:
            own += f", tree={self.tree!r}, siblings={self.siblings!r}"
        return f"SpeculativeJacobi({own})"

    @classmethod
    def takes_tree(cls, tree: TreeShape, source: DraftSource) -> bool:
        """See `WindowPolicy.takes_tree`; why trees are planned: `coupled_walk`."""
        return tree.can_draw(source)

    def decode(self, run: WindowRun) -> Generation:
        return iterate(run, self.coupling, exact_rule, self._open_walk(run))

    def _open_walk(self, run: WindowRun) -> CoupledWalk | None:
        """What walks the trees of a run; None for the chain alone."""
        if self.tree is None or not can_walk(run, self.tree, self.takes_tree):
            return None
        plan = self.tree.plan(run.chooser.widest)
        assert plan is not None, "checked by `takes_tree`"
        return CoupledWalk(run, plan, self.siblings, self.coupling)


def iterate(
    run: WindowRun, coupling: str, rule: Rule, walk: CoupledWalk | None = None
) -> Generation:
    """The loop shared by the exact and the relaxed rule.

    Args:
        run: a fresh run.
        coupling: how drafts after the first rejection are redrawn; always exact, whatever the
            rule.
        rule: decides which drafts are accepted.
        walk: of passes that cover trees, under the exact rule; None: none do.

    Returns:
        The finished generation.
    """
    record = DraftRecord(run)
    is_fused = (rule, coupling) == (exact_rule, "maximal")
    is_fused = is_fused and dispatch.takes("couple", run.buffer.tokens.device.type)
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
        record.hold(p_target)
        run.accept(tokens, accepted, spent)

    return run.run(step_fn)
