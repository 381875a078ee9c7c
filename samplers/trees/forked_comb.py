"""ForkedComb: a comb whose branches fork once more.

The likeliest alternatives to the chain become branches, as in `mmaccel.Comb`, those to the drafts
of branches twigs. Of all branches, then of all twigs, one draft is added at a time, so that the
drafter is called as often as a branch and a twig are long. Own study; no publication is known to
us.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.samplers.drafting.contract import Drafter, Nodes, OpenRun
from mmaccel.samplers.trees.contract import TreeShape
from mmaccel.samplers.trees.dyspec import extend_likeliest, fork_chain, round_chances
from mmaccel.samplers.trees.growth import Growth

_NEVER = float("-inf")


@dataclass(frozen=True)
class ForkedComb(TreeShape):
    """A comb whose branches fork once more: N branches of L drafts, and M twigs of K drafts that
    leave branches.

    Args:
        branches: N.
        length: L.
        twigs: M.
        twig_length: K; L + K - 1 is less than the window.
        ranks: of an entry's children that are looked at, the chain's draft among them.

    Figures: `scenes`, window 48, 127 drafts: 7.7 tokens a pass, as `Comb(16, 5)`.
    """

    branches: int = within(8, 1, 1024, "try 8")
    length: int = within(6, 1, 1024, "try 6")
    twigs: int = within(8, 1, 1024, "try 8")
    twig_length: int = within(4, 1, 1024, "try 4")
    ranks: int = within(6, 2, 64, "6 suits most drafts")

    name = "forked-comb"
    is_capturable = True

    @property
    def nodes(self) -> int:
        return self.branches * self.length + self.twigs * self.twig_length

    @property
    def depth(self) -> int:
        """As a twig may leave a branch's last draft but one."""
        return self.length + self.twig_length - 1

    def grow(self, run: OpenRun, drafter: Drafter, drafts: Tensor, noise: Tensor) -> Nodes | None:
        tree = Growth(run, drafter, drafts, noise)
        forks = fork_chain(tree, self.ranks)
        if forks is None:
            return None
        chances = forks.values[..., None] + round_chances(forks.log_probs)
        children = (forks.entries, forks.tokens, chances)
        branches, others = extend_likeliest(tree, *children, self.branches, self.length, self.ranks)
        needed = [branches]
        if others is not None:
            twigs, _ = extend_likeliest(tree, *others, self.twigs, self.twig_length, self.ranks)
            needed.append(twigs)
        return tree.nodes(torch.cat(needed, 1) > _NEVER)
