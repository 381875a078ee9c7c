"""A step over a tree, walked by frozen noise: the tokens are those of the plain loop.

Every entry of the pass has a token of its own, the argmax of its scores and its slot's frozen
noise. From the last accepted token on, the walk goes to the child that holds this token, as long as
there is one. All rows are walked at once: for the chain and for every branch it is counted how far
its drafts are right, and the longest wins. At most one path is right anywhere, so that the longest
is the path.

From then on the pass is one over a window, the *view*: the path's entries, and behind a branch that
won those of the chain, whose scores the next drafts begin with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.errors import OptionError
from mmaccel.kernels.sample import argmax
from mmaccel.samplers.drafting.contract import Branches, PassPath
from mmaccel.samplers.trees.contract import TreeShape
from mmaccel.samplers.window.run import WindowRun
from mmaccel.samplers.window.seeded_sampling import StepwiseDraws, draft_window


@dataclass(frozen=True)
class TreeEntries:
    """The entries of a pass: W of the window, then those of N branches of L.

    Attributes:
        forks: `[B, N]` int64, see `Branches`.
        tokens: `[B, W + N L]` int64, what each entry holds; the window's first one is not read.
        width, length: W, L.
    """

    forks: Tensor
    tokens: Tensor
    width: int
    length: int

    @classmethod
    def of(cls, drafts: Tensor, branches: Branches) -> TreeEntries:
        """Of a chain `[B, W-1]` and branches."""
        first = torch.zeros_like(drafts[:, :1])
        tokens = torch.cat([first, drafts, branches.tokens.flatten(1)], 1)
        return cls(branches.forks, tokens, drafts.shape[1] + 1, branches.tokens.shape[2])

    def parents(self) -> Tensor:
        """`[B, W + N L]` int64, see `mmaccel.contracts.Pass`."""
        rows, n_branches = self.forks.shape
        chain = torch.arange(-1, self.width - 1, device=self.forks.device).expand(rows, -1)
        own = torch.arange(n_branches * self.length, device=self.forks.device)
        own = own.view(n_branches, self.length) + self.width - 1  # the entry before
        own = own.repeat(rows, 1, 1)
        own[..., 0] = self.forks
        return torch.cat([chain, own.flatten(1)], 1)

    def depths(self) -> Tensor:
        """`[B, W + N L]` int64: how many slots after the window's first an entry predicts."""
        chain = torch.arange(self.width, device=self.forks.device).expand(len(self.forks), -1)
        steps = torch.arange(1, self.length + 1, device=self.forks.device)
        return torch.cat([chain, (self.forks[..., None] + steps).flatten(1)], 1)

    def views(self) -> tuple[Tensor, Tensor]:
        """What the window is if the chain or a branch wins.

        Returns:
            `[B, 1 + N, W]` int64, entries; and `[B, 1 + N]` int64, how many of the window's drafts
            belong to the path.
        """
        rows, n_branches = self.forks.shape
        slot = torch.arange(self.width, device=self.forks.device)
        chain = slot.expand(rows, 1, -1)
        step = slot - self.forks[..., None] - 1  # [B, N, W], place in the branch
        first = torch.arange(n_branches, device=slot.device)[:, None] * self.length + self.width
        is_own = (step >= 0) & (step < self.length)
        views = torch.cat([chain, torch.where(is_own, first + step, slot)], 1)
        ends = torch.cat(
            [torch.full_like(self.forks[:, :1], self.width), self.forks + self.length], 1
        )
        return views, ends


class TreeStep:
    """The steps of a run whose passes cover a tree.

    Args:
        run: fresh.
        shape: of the tree.
    """

    def __init__(self, run: WindowRun, shape: TreeShape) -> None:
        self._run = run
        self._shape = shape

    def __call__(self) -> None:
        """One step; see `WindowRun.run`."""
        run = self._run
        draws = StepwiseDraws(run)
        drafts = draft_window(run, draws)  # [B, W-1]
        noise = draws.noise  # [B, W, V]
        branches = (
            None if run.is_retry else self._shape.grow(run, run.drafter, drafts, noise[:, :-1])
        )
        if branches is None:
            tokens = draws.tokens()
            run.accept(tokens, tokens[:, :-1] == drafts)
            return
        entries = TreeEntries.of(drafts, branches)
        depths = entries.depths()
        slots = run.buffer.slots[:, :1] + depths
        pass_scores = run.scores.forward_tree(entries.tokens, entries.parents(), slots)
        rows = torch.arange(len(depths), device=depths.device)[:, None]
        found = run.backend.run(argmax, pass_scores.target + noise[rows, depths])  # [B, W + N L]

        path, kept = self._walk(entries, found)
        run.scores.keep(pass_scores, path)
        run.observe(noise)
        run.accept(found.gather(1, path.entries), kept)
        run.calls.commit(run.rows.first_positions(), path.entries, run.rows.n_new)

    def _walk(self, entries: TreeEntries, found: Tensor) -> tuple[PassPath, Tensor]:
        """The view of each row, and which of its drafts are right, `[B, W-1]` bool."""
        views, ends = entries.views()
        rows = torch.arange(len(found), device=found.device)[:, None, None]
        held, predicted = entries.tokens[rows, views], found[rows, views]  # [B, 1 + N, W]
        slot = torch.arange(entries.width - 1, device=found.device)
        is_right = (predicted[..., :-1] == held[..., 1:]) & (slot < ends[..., None])
        n_right = is_right.long().cumprod(-1).sum(-1)  # [B, 1 + N]
        best = n_right.argmax(1)  # at a tie the chain, which comes first
        row = rows[:, 0, 0]
        view = views[row, best]
        is_branch = view >= entries.width
        # the token buffer as the branch that won reads it
        buffer = self._run.buffer
        drafts = torch.where(
            is_branch, held[row, best], buffer.tokens.gather(1, buffer.columns - 1)
        )
        tokens = buffer.tokens.scatter(1, buffer.columns - 1, drafts)
        return PassPath(view, is_branch, tokens), is_right[row, best]


def can_grow(run: WindowRun) -> bool:
    """Whether the passes of a run may cover a tree; a note in its statistics says why not.

    Raises:
        OptionError: a model whose layers take no trees.
    """
    if not run.model.takes_trees:
        raise OptionError(
            f"tree: expected a model whose layers take trees, received a "
            f"{type(run.model).__name__} whose do not; leave tree out"
        )
    reason = ""
    if not run.drafter.source.has_branches:
        reason = f"drafts of {run.drafter.source!r} have no alternatives"
    elif run.params.processor is not None:
        reason = "logits processors read the tokens before a slot, and branches have others"
    elif run.calls.is_recorded:
        reason = "outputs of every step are asked for"
    if reason:
        run.stats.notes.append(f"tree: the chain alone, as {reason}")
    return not reason
