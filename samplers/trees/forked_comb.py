"""ForkedComb: a comb whose branches fork once more.

The likeliest alternatives to the chain become branches, as in `mmaccel.Comb`; the likeliest
alternatives to the drafts of branches become twigs. Of all branches and of all twigs one draft is
added at a time, the drafter's best for the path, so that the number of calls is the length of a
branch and of a twig together.

Own study; no publication is known to us. Cousins: see `mmaccel.samplers.trees.comb`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.checks import check_int
from mmaccel.samplers.drafting.contract import Drafter, DraftSource, Nodes, OpenRun
from mmaccel.samplers.trees.contract import TreeShape
from mmaccel.samplers.trees.dyspec import fork_chain, round_chances
from mmaccel.samplers.trees.growth import Growth

_NEVER = float("-inf")


@dataclass(frozen=True)
class ForkedComb(TreeShape):
    """N branches of L drafts, and M twigs of K drafts that leave branches.

    Args:
        branches: N.
        length: L.
        twigs: M.
        twig_length: K; L + K - 1 is less than the window.
        ranks: of an entry's children that are looked at, the chain's draft among them.
    """

    branches: int = 8
    length: int = 6
    twigs: int = 8
    twig_length: int = 4
    ranks: int = 6

    name = "forked-comb"

    def __post_init__(self) -> None:
        for name in ("branches", "length", "twigs", "twig_length"):
            check_int(f"ForkedComb.{name}", getattr(self, name), 1, 1024, hint="try 6")
        check_int("ForkedComb.ranks", self.ranks, 2, 64, hint="6 suits most drafts")

    @property
    def nodes(self) -> int:
        """N L + M K."""
        return self.branches * self.length + self.twigs * self.twig_length

    @property
    def depth(self) -> int:
        """L + K - 1, as a twig may leave a branch's last draft but one."""
        return self.length + self.twig_length - 1

    def can_grow(self, source: DraftSource) -> bool:
        """See `TreeShape.can_grow`."""
        return source.has_children

    def grow(self, run: OpenRun, drafter: Drafter, drafts: Tensor, noise: Tensor) -> Nodes | None:
        """See `TreeShape.grow`."""
        tree = Growth(run, drafter, drafts, noise)
        forks = fork_chain(tree, self.ranks)
        if forks is None:
            return None
        chances = forks.values[..., None] + round_chances(forks.log_probs)
        children = (forks.entries, forks.tokens, chances)
        branches, others = _extend(tree, *children, self.branches, self.length, self.ranks)
        needed = [branches]
        if others is not None:
            twigs, _ = _extend(tree, *others, self.twigs, self.twig_length, self.ranks)
            needed.append(twigs)
        return tree.nodes(torch.cat(needed, 1) > _NEVER)


def _extend(
    tree: Growth, entries: Tensor, tokens: Tensor, values: Tensor, n: int, length: int, ranks: int
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """Add the n likeliest of some children, and behind each the drafter's best drafts.

    Args:
        entries: `[B, m]` int64.
        tokens, values: `[B, m, k]`, their children and the logarithms of their chances.
        n, length: of the branches.
        ranks: see `ForkedComb`.

    Returns:
        The logarithms of the chances of all nodes that were added, `[B, n']`; and the children of
        these that were not: `entries`, `tokens` and `values`, None where there are none.
    """
    rank = values.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :n]
    last = tree.tokens.shape[1]
    tree.add(entries.gather(1, rank // tokens.shape[2]), tokens.flatten(1).gather(1, rank))
    own = values.flatten(1).gather(1, rank)
    added, left = [own], []
    for _ in range(1, length):
        entries = torch.arange(last, tree.tokens.shape[1], device=own.device).expand_as(own)
        found = tree.children(entries, ranks)
        assert found is not None
        chances = own[..., None] + round_chances(found.log_probs)
        if found.tokens.shape[2] > 1:
            left.append((entries, found.tokens[..., 1:], chances[..., 1:]))
        last = tree.tokens.shape[1]
        tree.add(entries, found.tokens[..., 0])
        own = chances[..., 0]
        added.append(own)
    if not left:
        return torch.cat(added, 1), None
    parts = (torch.cat([part[i] for part in left], 1) for i in range(3))
    return torch.cat(added, 1), tuple(parts)  # type: ignore[return-value]
