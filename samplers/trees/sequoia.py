"""Sequoia: the tree of a fixed shape that is best for measured chances of acceptance.

Z. Chen, A. May, R. Svirschevski, Y. Huang, M. Ryabinin, Z. Jia, B. Chen, "Sequoia: Scalable and
Robust Speculative Decoding", NeurIPS 2024 (arXiv 2402.12374), section 3.1: a child of rank r is
accepted with a chance that depends on r alone, so that the most tokens of a tree of n nodes follow
from those of smaller trees, c(n) = 1 + max over n_1 + n_2 + … = n - 1 of the sum of p_r c(n_r), and
the same with a limit of the depth.

Departures: chances also depend on how many drafts are before. The chain of the window is in the
tree in any case and costs no node. With frozen noise nothing is sampled: rank r is the drafter's
r-th best. Where a draft model draws the tree, rank r is the r-th draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mmaccel.checks import show, within
from mmaccel.errors import OptionError
from mmaccel.samplers.drafting.contract import Drafter, Nodes, OpenRun
from mmaccel.samplers.trees.contract import Plan, Planned, TreeShape
from mmaccel.samplers.trees.growth import Growth, grow_planned

Chances = tuple[tuple[float, ...], ...]  # by the number of drafts before, by rank

# coarse drafts of `scenes`, 8 captions, a window of 40: benchmarks/tree_acceptance.py
_FIRST = (0.73, 0.12, 0.05, 0.014, 0.007, 0.004)
_SECOND = (0.79, 0.10, 0.022, 0.014, 0.007, 0.004)
_NEAR = (0.86, 0.065, 0.019, 0.009, 0.005, 0.001)
_FAR = (0.60, 0.11, 0.043, 0.022, 0.014, 0.009)
COARSE: Chances = (_FIRST, _SECOND, *(_NEAR,) * 10, _FAR)


@dataclass(frozen=True)
class Sequoia(TreeShape):
    """A tree of at most N nodes, the same in every pass: the best for measured chances of each
    rank.

    Args:
        nodes: N.
        depth: the most nodes of a path, less than the window; the drafter is asked as often.
        acceptance: p of a child by the number of drafts before it (the last row holds for all later
            ones), then by its rank, the likeliest first. The default is that of coarse drafts.

    Loses: where errors of a chain come together, as on images: shapes of one size are equally good.
    Figures: `scenes`, window 48, 80 nodes: 7.7 tokens a pass (`DySpec` 8.0).
    """

    nodes: int = within(32, 1, 1024, "32 suits a window of 32")
    depth: int = within(8, 1, 1024, "8 suits a window of 32")
    acceptance: Chances = within(  # not shown: long, and tokens do not depend on it
        COARSE, 0, 1, "count how often each rank is right", repr=False
    )

    name = "sequoia"
    is_capturable = True

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = self.acceptance
        if not rows or any(len(row) < 2 or sum(row) > 1 for row in rows):
            raise OptionError(
                "Sequoia.acceptance: expected rows of two or more chances of a sum up to 1, "
                f"received {show(rows)}; count how often each rank is right"
            )

    def grow(self, run: OpenRun, drafter: Drafter, drafts: Tensor, noise: Tensor) -> Nodes | None:
        plan = self.plan(run.chooser.widest)
        return grow_planned(Growth(run, drafter, drafts, noise), plan)

    def plan(self, width: int) -> Plan:
        return plan_tree(self.nodes, self.depth, self.acceptance, width)


@lru_cache(64)
def plan_tree(n_nodes: int, depth: int, acceptance: Chances, width: int) -> Plan:
    """The best tree beside a chain of W - 1 drafts, generation by generation."""
    last = len(acceptance) - 1
    chances = [torch.tensor(row, dtype=torch.float64) for row in acceptance]
    # behind[g][d]: up to g generations behind a node that d drafts end with
    empty: tuple[Tensor, list[Tensor]] = (torch.zeros(n_nodes + 1, dtype=torch.float64), [])
    behind = [[empty] * (last + 1)]
    for _ in range(depth):
        after = behind[-1]
        behind.append([_share(chances[d], after[min(d + 1, last)][0]) for d in range(last + 1)])
    # chain[d]: nodes that leave the chain after d or more drafts; its next draft costs none
    chain = [empty]
    for d in reversed(range(width - 1)):
        row = min(d, last)
        free = chances[row][0] * (1 + chain[0][0])
        chain.insert(0, _share(chances[row], behind[depth - 1][min(d + 1, last)][0], free))

    # the nodes, from the first entry on
    generations: list[list[Planned]] = [[] for _ in range(depth)]
    todo = [(-1, 0, 0, n_nodes)]  # generation, entry, drafts before, nodes behind it
    number = width
    while todo:
        generation, entry, d, n = todo.pop(0)
        is_chain = generation < 0
        shares = chain[d][1] if is_chain else behind[depth - 1 - generation][min(d, last)][1]
        for rank in reversed(range(len(shares))):
            share = int(shares[rank][n])  # nodes of the child, itself included
            n -= share
            if is_chain and rank == 0:
                todo.append((-1, entry + 1, d + 1, share))
            elif share:
                generations[generation + 1].append(Planned(number, entry, rank, d + 1))
                todo.append((generation + 1, number, d + 1, share - 1))
                number += 1
    return tuple(tuple(sorted(nodes, key=lambda node: node.rank)) for nodes in generations)


def _share(
    chances: Tensor, behind: Tensor, free: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Share up to N nodes among the children of an entry, for all n at once, by the chances p of
    ranks.

    `behind` `[N + 1]` are the tokens behind a child with so many nodes behind it, `free` `[N + 1]`
    the same of a first child that costs no node. Returns the tokens behind the entry `[N + 1]`, and
    for each rank its nodes `[N + 1]` int64, if the ranks up to it have this many.
    """
    n = torch.arange(len(behind))
    rest = n[:, None] - n  # [N + 1, N + 1], what a child leaves to those before it
    best = torch.zeros_like(behind)
    shares = []
    for rank, chance in enumerate(chances):
        gain = torch.cat([behind.new_zeros(1), chance * (1 + behind[:-1])])
        if rank == 0 and free is not None:
            gain = free
        sums = (best[rest.clamp(min=0)] + gain).masked_fill(rest < 0, float("-inf"))
        best, share = sums.max(1)
        shares.append(share)
    return best, shares
