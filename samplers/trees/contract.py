"""The contract of trees: what a pass verifies beside the chain of a window's drafts.

A `TreeShape` is configuration, a policy's field `tree`. Before a pass it asks the run's drafter for
nodes: other drafts, each of which follows an entry of the chain or a node before it. The pass
covers the window and, behind it, all nodes; an entry attends to those that it follows.

With frozen noise one token is right at every slot, and the longest path from the window's first
entry whose drafts are all right is accepted (`walk.py`). Policies that are exact in distribution
accept a child of each entry by a rule (`rule_walk.py`); nodes are then drafts that are certain, or
drawn for a tree that is planned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from mmaccel.capabilities import Capable, Exclusions, Words
from mmaccel.checks import Checked, check_answer, check_kind, show
from mmaccel.contracts import TokenModel
from mmaccel.errors import OptionError, ShapeError
from mmaccel.samplers.drafting.contract import NO_GRAPHS, Drafter, DraftSource, Nodes, OpenRun
from mmaccel.samplers.trees.entries import TreeEntries

if TYPE_CHECKING:
    from mmaccel.samplers.window.policy import WindowPolicy


class Planned(NamedTuple):
    """A node of a tree that is the same in every pass."""

    number: int  # of the node, from the widest window's W on
    parent: int  # the entry of the widest window's pass that it follows
    rank: int  # among the children of that entry; the chain's draft has rank 0
    depth: int  # drafts on its path


Plan = tuple[tuple[Planned, ...], ...]
"""Generations of nodes: the first follow the chain, all others the generation before."""


@dataclass(frozen=True)
class TreeShape(Checked, Capable, ABC):
    slot = "tree"
    name: ClassVar[str] = ""  # short name
    # a row's nodes depend on other rows, and so would its tokens under a policy of fresh noise
    only_bitwise: ClassVar[bool] = False
    # `grow` never synchronises with the host, so that steps may be captured as CUDA graphs; its
    # nodes are then not checked
    is_capturable: ClassVar[bool] = False
    asks_children: ClassVar[bool] = True  # `grow` asks the drafter what may follow entries

    @property
    def needs(self) -> Words:
        return frozenset({"trees", "fixed noise"} if self.only_bitwise else {"trees"})

    @property
    def excludes(self) -> Exclusions:
        return {} if self.is_capturable else NO_GRAPHS

    @property
    @abstractmethod
    def nodes(self) -> int:
        """N, the most entries that a pass has beside its window."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """The most nodes of a path."""

    def plan(self, width: int) -> Plan:
        """The tree of every pass, for drafts that are drawn; empty: it depends on the drafts."""
        return ()

    def ways(self, source: DraftSource) -> set[str]:
        """How drafters of a source give nodes: "grown" as `grow` asks, "drawn" for `plan`."""
        ways = set()
        if source.has_children or not self.asks_children:
            ways.add("grown")
        if source.draws_trees and self.plan(self.depth + 1):
            ways.add("drawn")
        return ways

    @abstractmethod
    def grow(self, run: OpenRun, drafter: Drafter, drafts: Tensor, noise: Tensor) -> Nodes | None:
        """Nodes beside the chain `[B, W-1]`, their number by W alone; `noise` as in `Drafter`."""


def check_tree(policy: WindowPolicy) -> None:
    tree: object = policy.tree
    window = policy.window
    source = policy.draft_source()
    if not isinstance(tree, TreeShape):
        raise OptionError(
            f"tree: expected a shape such as mmaccel.Comb(branches=12, length=7), received "
            f"{show(tree)}; give one, or leave tree out"
        )
    if not isinstance(window, int) or window <= tree.depth:
        raise OptionError(
            f"tree: expected a window of more than {tree.depth} tokens for {tree!r}, received "
            f"window={window!r}; give a wider window or shorter branches"
        )
    if not tree.ways(source) & policy.tree_ways:
        raise OptionError(
            f"tree: expected drafts that have alternatives for {tree!r} under "
            f"{type(policy).__name__}, received {source!r}; take {policy.tree_remedy}, or leave "
            "tree out"
        )


def check_nodes(shape: TreeShape, nodes: Nodes, drafts: Tensor, vocab_size: int) -> None:
    """Raise ShapeError unless a shape grew `Nodes`. Cost, uncaptured: two host synchronisations."""
    rows = len(drafts)
    width = drafts.shape[1] + 1
    name = f"{type(shape).__name__}.grow"
    check_kind(name, nodes, Nodes, "return Nodes(tokens, parents), or None")
    n = min(getattr(nodes.tokens, "shape", (0, 0))[-1], shape.nodes)
    hint = f"give each of up to {shape.nodes} nodes a token and a parent"
    for tensor in nodes[:2]:
        check_answer(name, tensor, (rows, n), "int64", hint)
    if shape.is_capturable or not n:
        return
    check_answer(f"{name} tokens", nodes.tokens, (rows, n), "int64", within=(0, vocab_size - 1))
    number = torch.arange(width, width + n, device=drafts.device)
    if bool(((nodes.parents < 0) | (nodes.parents >= number)).any()):
        raise ShapeError(
            f"{name}: expected parents before their nodes, which begin at entry {width}, received "
            f"{nodes.parents[0].tolist()} in row 0; put each node behind the one that it follows"
        )
    deepest = int(TreeEntries.of(drafts, nodes).depths().max())
    if deepest >= width:
        raise ShapeError(
            f"{name}: expected paths of up to {width - 1} drafts, with those of the chain, "
            f"received one of {deepest}; windows narrow where rows end: leave out what is deeper"
        )


def count_spare(tree: object | None, model: TokenModel, widest: int) -> int:
    """Cache indices a row beside its positions: nodes stand behind the whole window."""
    if not isinstance(tree, TreeShape) or model.lack("trees", tree):
        return 0
    return widest + tree.nodes
