"""A step over a tree, walked by frozen noise: the tokens are those of the plain loop.

Every entry of the pass has a token of its own, the argmax of its scores and its slot's frozen
noise. From the last accepted token on, the walk goes to a child that holds this token, as long as
there is one. All rows are walked at once: an entry is right if it and all that it follows hold the
tokens found above them, and the deepest one wins. Two are as deep only where a draft stands twice
after the same entry; then the first wins, which is the chain's if it is one of them.

From then on the pass is one over a window, the *view*: the path to that entry, its first
descendants and behind them the entries of the chain, whose scores the next drafts begin with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.capabilities import explain, refuse
from mmaccel.kernels.sample import argmax
from mmaccel.samplers.drafting.contract import PassPath
from mmaccel.samplers.trees.contract import TreeShape, check_nodes
from mmaccel.samplers.trees.entries import TreeEntries
from mmaccel.samplers.window.run import WindowRun
from mmaccel.samplers.window.seeded_sampling import StepwiseDraws, draft_window


class TreeStep:
    def __init__(self, run: WindowRun, shape: TreeShape) -> None:
        self._run = run
        self._shape = shape
        self._leaves_out = not run.model.lack("mixed passes")

    def __call__(self) -> None:
        run = self._run
        draws = StepwiseDraws(run)
        drafts = draft_window(run, draws)  # [B, W-1]
        noise = draws.noise  # [B, W, V]
        nodes = None
        if not run.is_retry:
            nodes = self._shape.grow(run, run.drafter, drafts, noise[:, :-1])
        if nodes is None:
            tokens = draws.tokens()
            run.accept(tokens, tokens[:, :-1] == drafts)
            return
        check_nodes(self._shape, nodes, drafts, run.vocab_size)
        entries = TreeEntries.of(drafts, nodes)
        depths = entries.depths()
        wanted = nodes.wanted if self._leaves_out else None
        pass_scores = run.passes.forward_tree(entries.tokens, entries.parents, depths, wanted)
        rows = torch.arange(len(depths), device=depths.device)[:, None]
        targets = run.backend.run(argmax, pass_scores.target + noise[rows, depths])  # [B, E]

        path, kept = self.walk(entries, targets)
        run.passes.keep(pass_scores, path)
        run.observe(noise)
        run.accept_path(path, targets.gather(1, path.entries), kept)

    def walk(self, entries: TreeEntries, targets: Tensor) -> tuple[PassPath, Tensor]:
        """The view of each row, and which of its drafts are right, `[B, W-1]` bool."""
        right_depths = entries.depths().masked_fill(~entries.is_right(targets), -1)
        last = right_depths.argmax(1)  # at a tie the first
        n_right = right_depths.gather(1, last[:, None])
        slot = torch.arange(entries.width - 1, device=targets.device)
        return find_path(self._run, entries, last), slot < n_right


def find_path(run: WindowRun, entries: TreeEntries, last: Tensor) -> PassPath:
    """The window that paths to entries `last` `[B]` are in, as of passes without a tree."""
    view = entries.view(last)
    is_branch = view >= entries.width
    # the token buffer as the view's entries read it
    rows = run.rows
    columns = rows.columns - 1
    drafts = torch.where(is_branch, entries.tokens.gather(1, view), rows.tokens.gather(1, columns))
    return PassPath(view, is_branch, rows.tokens.scatter(1, columns, drafts))


def find_walked(run: WindowRun) -> TreeShape | None:
    """The tree that passes of a run cover; None, and a note that says why, for the chain alone."""
    shape = run.policy.tree
    if shape is None:
        return None
    refuse(explain(shape, run.model))
    reason = ""
    source = run.drafter.source
    if not shape.ways(source) & run.policy.tree_ways:
        reason = f"drafts of {source!r} have no alternatives"
    elif run.params.processor is not None:
        reason = "logits processors read the tokens before a slot, and branches have others"
    elif run.params.is_spread:
        reason = "evenly spread samples follow one path"
    elif run.passes.recording is not None:
        reason = "outputs of every step are asked for"
    if not reason:
        return shape
    run.stats.notes.append(f"tree: the chain alone, as {reason}")
    return None
