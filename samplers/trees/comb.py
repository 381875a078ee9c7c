"""Comb: a chain of drafts, and branches of one length that leave it.

The shape is static: a pass always has as many entries. Own study; no publication is known to us.
Cousins: xPress (arXiv 2608.02438) and LiLiCorr (arXiv 2608.20530) correct drafts of a block;
SpecInfer (X. Miao et al., arXiv 2305.09781, section 4) verifies trees.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.checks import within
from mmaccel.samplers.drafting.contract import Drafter, Nodes, OpenRun
from mmaccel.samplers.trees.contract import Plan, Planned, TreeShape
from mmaccel.samplers.trees.dyspec import extend_likeliest, fork_chain, round_chances
from mmaccel.samplers.trees.growth import Growth

_RANKS = 6  # of an entry's children that are looked at, the chain's draft among them


@dataclass(frozen=True)
class Comb(TreeShape):
    """A chain of drafts, and N branches of L drafts that leave it: the likeliest alternatives to
    drafts of the chain, each continued by the drafter.

    Args:
        branches: N.
        length: L, less than the window.

    Loses: on a CPU, which pays for every entry.
    Figures: `scenes`, coarse drafts: window 40 with `Comb(12, 7)` 7.8 tokens a pass, no tree at 64
    6.7.
    """

    branches: int = within(12, 1, 1024, "12 suits a window of 40")
    length: int = within(7, 1, 1024, "7 suits a window of 40")

    name = "comb"
    is_capturable = True

    @property
    def nodes(self) -> int:
        return self.branches * self.length

    @property
    def depth(self) -> int:
        return self.length

    def plan(self, width: int) -> Plan:
        """Branch b leaves the chain after b drafts; beyond its end, each has a second."""
        n_forks = width - self.length
        generations: list[list[Planned]] = [[] for _ in range(self.length)]
        for branch in range(self.branches):
            fork = branch % n_forks
            parent = fork
            for step in range(self.length):
                rank = 0 if step else 1 + branch // n_forks
                number = width + branch * self.length + step
                generations[step].append(Planned(number, parent, rank, fork + step + 1))
                parent = number
        return tuple(map(tuple, generations))

    def grow(self, run: OpenRun, drafter: Drafter, drafts: Tensor, noise: Tensor) -> Nodes | None:
        """Branches are shorter where a narrow window ends a row."""
        length = min(self.length, drafts.shape[1])
        if length < 1:
            return None
        if drafter.source.has_branches:
            return drafter.branch(run, drafts, noise, n_branches=self.branches, length=length)
        # the likeliest alternatives to the chain's drafts, each followed by the drafter's best
        tree = Growth(run, drafter, drafts, noise)
        forks = fork_chain(tree, _RANKS)
        if forks is None:
            return None
        chances = forks.values[..., None] + round_chances(forks.log_probs)
        children = (forks.entries, forks.tokens, chances)
        branches, _ = extend_likeliest(tree, *children, self.branches, length, _RANKS)
        return tree.nodes(branches > float("-inf"))
