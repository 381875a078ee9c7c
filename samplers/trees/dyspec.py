"""DySpec: the likeliest nodes, whatever tree they make.

Y. Xiong, R. Zhang, Y. Li, L. Zou, "DySpec: Faster Speculative Decoding with Dynamic Token Tree
Structure", 2024 (arXiv 2410.11744): a node adds to the tokens of a pass the chance that it is
accepted, which is close to the product of the drafter's probabilities on its path. The tree that
takes nodes in the order of these products has the most tokens a pass of all of its size.

Departures: with frozen noise one token of a slot is right, so that a child's worth is the drafter's
chance of being it. The chain of the window is in the tree in any case. Nodes are added a generation
at a time, all that are among the best N so far, which gives the tree of one by one up to `depth`
steps behind the chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.samplers.drafting.contract import Drafter, Nodes, OpenRun
from mmaccel.samplers.trees.contract import TreeShape
from mmaccel.samplers.trees.growth import Growth

_NEVER = float("-inf")


@dataclass(frozen=True)
class DySpec(TreeShape):
    """The N likeliest nodes, whatever tree they make; a node's chance is the product of the
    drafter's on its path.

    Args:
        nodes: N.
        depth: the most nodes of a path, less than the window; the drafter is asked as often.
        ranks: of an entry's children that are looked at, the chain's draft among them.

    Loses: on a CPU: it asks the drafter `depth` times a pass.
    Figures: `scenes`: window 64 with 64 nodes 8.1 tokens a pass; an oracle over the same six ranks
    10.2.
    """

    nodes: int = within(32, 1, 1024, "32 suits a window of 32")
    depth: int = within(8, 1, 1024, "8 suits a window of 32")
    ranks: int = within(6, 2, 64, "6 suits most drafts")

    name = "dyspec"
    is_capturable = True

    def grow(self, run: OpenRun, drafter: Drafter, drafts: Tensor, noise: Tensor) -> Nodes | None:
        tree = Growth(run, drafter, drafts, noise)
        chances = grow_likeliest(tree, self.nodes, self.depth, self.ranks, expand=self.nodes)
        if chances is None:
            return None
        return tree.nodes(self.is_needed(chances))._replace(wanted=self.find_wanted(chances))

    def find_wanted(self, chances: Tensor) -> Tensor | None:
        """`Nodes.wanted`, by the logarithms of chances `[B, N]`."""
        return None

    def is_needed(self, chances: Tensor) -> Tensor:
        """Which nodes are verified, `[B, N]` bool, by their chances, falling; -inf for none."""
        return chances > _NEVER


def grow_likeliest(
    tree: Growth, n_nodes: int, depth: int, ranks: int, *, expand: int
) -> Tensor | None:
    """Add `depth` generations of nodes, and keep the N likeliest; returns the logarithms of their
    chances `[B, N]`, falling; None for a pass without a tree.

    The drafter is asked for the `ranks` best children of the `expand` likeliest nodes not asked
    about.
    """
    forks = fork_chain(tree, ranks)
    if forks is None:
        return None
    chances = add_children(tree, *forks)
    is_open = torch.ones_like(chances, dtype=torch.bool)
    chances, is_open = keep_likeliest(tree, chances, is_open, n_nodes)
    for _ in range(depth - 1):
        ranked = chances.masked_fill(~is_open, _NEVER)
        best = ranked.sort(dim=1, descending=True, stable=True).indices[:, :expand]
        entries = best + tree.width
        children = tree.children(entries, ranks)
        assert children is not None
        values = ranked.gather(1, best)
        more = add_children(tree, entries, values, children.tokens, children.log_probs)
        is_open = is_open.scatter(1, best, False)
        is_open = torch.cat([is_open, torch.ones_like(more, dtype=torch.bool)], 1)
        chances = torch.cat([chances, more], 1)
        chances, is_open = keep_likeliest(tree, chances, is_open, n_nodes)
    return chances


class Forks(NamedTuple):
    """Alternatives to the drafts of the chain, the likeliest first."""

    entries: Tensor  # [B, W-1] int64, which they follow
    values: Tensor  # [B, W-1], logarithms of the chances of these entries
    tokens: Tensor  # [B, W-1, k-1] int64
    log_probs: Tensor  # [B, W-1, k-1], of being right behind an entry that is


def fork_chain(tree: Growth, ranks: int) -> Forks | None:
    """What may stand beside the chain's drafts, of k children each; None for a pass without."""
    if tree.width == 1:
        return None
    entries = tree.parents[:, 1:]
    children = tree.children(entries, ranks)
    if children is None:
        return None
    values = chances_of_chain(children.log_probs)
    return Forks(entries, values, children.tokens[..., 1:], children.log_probs[..., 1:])


def add_children(
    tree: Growth, entries: Tensor, values: Tensor, tokens: Tensor, log_probs: Tensor
) -> Tensor:
    """Add children `[B, n, k]` of entries `[B, n]`; their chances' logarithms `[B, n k]`."""
    parents = entries[..., None].expand_as(tokens).flatten(1)
    tree.add(parents, tokens.flatten(1))
    return (values[..., None] + round_chances(log_probs)).flatten(1)


def keep_likeliest(tree: Growth, chances: Tensor, is_new: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Keep the n likeliest nodes; at a tie the first, as nodes stand behind their parents."""
    best = chances.sort(dim=1, descending=True, stable=True).indices[:, :n]
    tree.keep(best + tree.width)
    return chances.gather(1, best), is_new.gather(1, best)


def extend_likeliest(
    tree: Growth, entries: Tensor, tokens: Tensor, values: Tensor, n: int, length: int, ranks: int
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """Add the n likeliest children (`tokens` `[B, m, k]`, `values` their chances' logarithms) of
    `entries` `[B, m]` int64, and behind each the drafter's best `ranks`.

    Returns:
        The logarithms of the chances of all nodes that were added, `[B, n']`; and the children of
        these that were not: `entries`, `tokens` and `values`, None where there are none.
    """
    rank = values.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :n]  # in [m k]
    last = tree.tokens.shape[1]
    tree.add(entries.gather(1, rank // tokens.shape[2]), tokens.flatten(1).gather(1, rank))
    ends = values.flatten(1).gather(1, rank)  # chances of the branches so far
    added, others = [ends], []
    for _ in range(1, length):
        entries = torch.arange(last, tree.tokens.shape[1], device=ends.device).expand_as(ends)
        children = tree.children(entries, ranks)
        assert children is not None
        chances = ends[..., None] + round_chances(children.log_probs)
        if children.tokens.shape[2] > 1:
            others.append((entries, children.tokens[..., 1:], chances[..., 1:]))
        last = tree.tokens.shape[1]
        tree.add(entries, children.tokens[..., 0])
        ends = chances[..., 0]
        added.append(ends)
    if not others:
        return torch.cat(added, 1), None
    all_entries, all_tokens, all_values = (torch.cat(parts, 1) for parts in zip(*others))
    return torch.cat(added, 1), (all_entries, all_tokens, all_values)


def chances_of_chain(log_probs: Tensor) -> Tensor:
    """`[B, W-1]`, logarithms of the chances of what the chain's drafts follow."""
    on_chain = round_chances(log_probs[..., 0]).cumsum(1)
    return torch.cat([torch.zeros_like(on_chain[:, :1]), on_chain[:, :-1]], 1)


def round_chances(log_probs: Tensor) -> Tensor:
    """Multiples of 1/1024, whose sums are exact whatever the other rows of a batch."""
    return (log_probs * 1024).round() / 1024
