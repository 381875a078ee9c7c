"""A pass over a drawn tree of a policy whose window is kept: later slots are redrawn by a coupling.

The walk is that of `rule_walk.py`. Then the pass is one over a window, the view of `walk.py`. Slots
behind the walk are redrawn from what the pass said of their entries, as
`mmaccel.samplers.window.speculative_jacobi` describes: a first child was drawn from q as the
chain's draft was, so that the same couplings hold.

The shape is planned. One that chose its nodes by the drafts would choose with them what the view
holds: a draft that is in it because another was unlikely no longer has the distribution recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.kernels.acceptance import redraw
from mmaccel.kernels.sample import argmax
from mmaccel.samplers.acceptance import is_kept
from mmaccel.samplers.noise import Fresh
from mmaccel.samplers.trees.contract import Plan
from mmaccel.samplers.trees.drawn import DrawnTree, draw_tree
from mmaccel.samplers.trees.rule_walk import choose_by_rule, walk
from mmaccel.samplers.trees.siblings.contract import SiblingRule
from mmaccel.samplers.trees.walk import find_path
from mmaccel.samplers.window.draft_record import DraftRecord, DrawnDrafts
from mmaccel.samplers.window.run import WindowRun


class CoupledWalk:
    def __init__(self, run: WindowRun, plan: Plan, rule: SiblingRule, coupling: str) -> None:
        self._run = run
        self._plan = plan
        self._rule = rule
        self._coupling = coupling

    def grow(self, drafts: DrawnDrafts) -> DrawnTree | None:
        run = self._run
        if run.is_retry:
            return None
        return draw_tree(run, run.drafter, self._rule, self._plan, drafts.tokens, drafts.p_draft)

    def verify(
        self, tree: DrawnTree, noise: Tensor | None, fresh: Fresh, record: DraftRecord
    ) -> None:
        """One pass over a tree; what the path's tokens are is generated."""
        run = self._run
        entries, choose = choose_by_rule(run, tree, self._rule, fresh)
        pass_scores = run.passes.forward_tree(entries.tokens, entries.parents, entries.depths())
        reads_back = not run.runner.is_static
        last, n_right, walked = walk(
            entries.width, pass_scores.target, choose, reads_back=reads_back
        )

        # from here on the pass is one over the window that the path is in
        path = find_path(run, entries, last)
        run.passes.keep(pass_scores, path)
        run.observe(noise)
        rows = torch.arange(len(last), device=last.device)[:, None]
        scores = pass_scores.target[rows, path.entries]  # [B, W, V]
        p_target = scores.softmax(-1)
        behind = self._redraw(tree, path.entries, scores, p_target, fresh)
        index = torch.arange(entries.width, device=last.device)
        tokens = torch.where(index <= n_right[:, None], walked, behind)
        record.hold(p_target)
        run.accept_path(path, tokens, index[:-1] < n_right[:, None])

    def _redraw(
        self, tree: DrawnTree, view: Tensor, scores: Tensor, p_target: Tensor, fresh: Fresh
    ) -> Tensor:
        """Tokens `[B, W]` behind the walk, by the scores `[B, W, V]` of entries `view` `[B, W]`."""
        run = self._run
        if self._coupling == "gumbel":
            tokens: Tensor = run.backend.run(argmax, scores + run.frozen_noise())
            return tokens
        after = view[:, 1:]  # the entries that hold the drafts of slots 0 … W-2
        drafts = tree.tokens.gather(1, after)
        rows = torch.arange(len(view), device=view.device)[:, None]
        p_draft = tree.p_draft[rows, tree.parents.gather(1, after)]  # [B, W-1, V]
        if self._coupling == "independent":
            is_there = torch.zeros_like(drafts, dtype=torch.bool)
        else:
            is_there = tree.is_there.gather(1, after)
        keeps = is_there & is_kept(p_target[:, :-1], p_draft, drafts, fresh.coins[:, :-1])
        p_draft = torch.where(is_there[..., None], p_draft, 0.0)
        redrawn: Tensor = run.backend.run(redraw, p_target, p_draft, drafts, keeps, fresh.redraws)
        return redrawn
