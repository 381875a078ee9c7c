"""The contract of trees: what a pass verifies beside the chain of a window's drafts.

A `TreeShape` is configuration: a frozen dataclass that a policy carries in its field `tree`. Before
a pass it asks the run's drafter for nodes: other drafts, each of which follows an entry of the
chain or a node before it. The pass then covers the window and, behind it, all nodes; an entry
attends to those that it follows.

With the noise of slots held fixed, one token is right at every slot. What is accepted is a path
from the window's first entry: the longest whose drafts are all right (`walk.py`). Policies that are
exact in distribution go from entry to entry instead and accept a child of each by a rule
(`rule_walk.py`); nodes are then drafts that are certain, or drawn for a tree that is planned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mmaccel.checks import Checked, check_answer, check_int, check_kind, show
from mmaccel.contracts import TokenModel
from mmaccel.errors import OptionError, ShapeError
from mmaccel.results import Exactness
from mmaccel.samplers.drafting.contract import Drafter, DraftSource, Nodes, OpenRun
from mmaccel.samplers.trees.entries import TreeEntries


class Planned(NamedTuple):
    """A node of a tree that is the same in every pass.

    Attributes:
        number: of the node, from the widest window's W on.
        parent: the entry of the widest window's pass that it follows.
        rank: among the children of that entry; the chain's draft has rank 0.
        depth: how many drafts there are on its path.
    """

    number: int
    parent: int
    rank: int
    depth: int


Plan = tuple[tuple[Planned, ...], ...]
"""Generations of nodes: the first follow the chain, all others the generation before."""


@dataclass(frozen=True)
class TreeShape(Checked, ABC):
    """Base of tree shapes.

    Attributes:
        name: short name.
        only_bitwise: whether a row's nodes depend on other rows, so that its tokens would, too,
            under a policy that is exact in distribution.
        is_capturable: whether `grow` never synchronises with the host, so that steps may be
            captured as CUDA graphs; then its nodes are not checked.
    """

    name: ClassVar[str] = ""
    only_bitwise: ClassVar[bool] = False
    is_capturable: ClassVar[bool] = False

    @property
    @abstractmethod
    def nodes(self) -> int:
        """N, the most entries that a pass has beside its window."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """The most nodes of a path."""

    @abstractmethod
    def can_grow(self, source: DraftSource) -> bool:
        """Whether drafters of a source answer what `grow` asks them."""

    def plan(self, width: int) -> Plan | None:
        """The tree that every pass has, for drafts that are drawn; None: it depends on the drafts.

        Args:
            width: W, of the widest window.
        """
        return None

    def can_draw(self, source: DraftSource) -> bool:
        """Whether drafters of a source draw the drafts of `plan`."""
        return source.draws_trees() and self.plan(self.depth + 1) is not None

    @abstractmethod
    def grow(self, run: OpenRun, drafter: Drafter, drafts: Tensor, noise: Tensor) -> Nodes | None:
        """Nodes beside the chain of a window; None for a pass without.

        Their number depends on the window's width alone.

        Args:
            run: whose token buffer holds the chain's drafts.
            drafts: `[B, W-1]` int64, the chain.
            noise: frozen noise of the draft slots, `[B, W-1, V]`; zeros `[B, W-1, 1]` at
                temperature 0.
        """


def check_tree(
    tree: object,
    window: int | str,
    source: DraftSource,
    exactness: Exactness,
    *,
    policy: str,
    takes: Callable[[TreeShape, DraftSource], bool],
    remedy: str,
) -> None:
    """Refuse a tree that a policy cannot have.

    Args:
        policy: its name.
        takes: whether the policy can walk a tree over drafts of a source.
        remedy: drafts and trees that it can.

    Raises:
        OptionError: no tree; one for bitwise policies alone; a window that changes, or is too
            narrow; drafts without alternatives.
    """
    if not isinstance(tree, TreeShape):
        raise OptionError(
            f"tree: expected a shape such as mmaccel.Comb(branches=12, length=7), received "
            f"{show(tree)}; give one, or leave tree out"
        )
    name = type(tree).__name__
    check_int(f"{name}.nodes", tree.nodes, 1, hint="count the nodes beside the window")
    check_int(f"{name}.depth", tree.depth, 0, hint="count the nodes of the longest path")
    if tree.only_bitwise and exactness != "bitwise":
        raise OptionError(
            f"tree: expected a bitwise policy for {tree!r}, whose rows share nodes, received one "
            f"whose exactness is {exactness}; take mmaccel.DySpec(nodes={tree.nodes}), or Jacobi()"
        )
    if not isinstance(window, int) or window <= tree.depth:
        raise OptionError(
            f"tree: expected a window of more than {tree.depth} tokens for {tree!r}, received "
            f"window={window!r}; give a wider window or shorter branches"
        )
    if not takes(tree, source):
        raise OptionError(
            f"tree: expected drafts that have alternatives for {tree!r} under {policy}, received "
            f"{source!r}; take {remedy}, or leave tree out"
        )


def check_nodes(shape: TreeShape, nodes: Nodes, drafts: Tensor, vocab_size: int) -> None:
    """Raise ShapeError unless a shape grew what `Nodes` describes.

    Args:
        shape: that grew them.
        nodes: what it grew.
        drafts: `[B, W-1]` int64, the chain.
        vocab_size: V.

    Cost: two host synchronisations, for the ranges and the depths, unless the shape is captured.
    """
    rows = len(drafts)
    width = drafts.shape[1] + 1
    name = f"{type(shape).__name__}.grow"
    check_kind(name, nodes, Nodes, "return Nodes(tokens, parents), or None")
    n = min(getattr(nodes.tokens, "shape", (0, 0))[-1], shape.nodes)
    hint = f"give each of up to {shape.nodes} nodes a token and a parent"
    for tensor in nodes:
        check_answer(name, tensor, (rows, n), "int64", hint)
    if shape.is_capturable or not n:
        return
    number = torch.arange(width, width + nodes.parents.shape[1], device=drafts.device)
    is_wrong = (nodes.parents < 0) | (nodes.parents >= number)
    is_strange = (nodes.tokens < 0) | (nodes.tokens >= vocab_size)
    if bool((is_wrong | is_strange).any()):
        raise ShapeError(
            f"{name}: expected tokens in 0..{vocab_size - 1} and parents before their nodes, which "
            f"begin at entry {width}, received tokens {nodes.tokens[0].tolist()} and parents "
            f"{nodes.parents[0].tolist()} in row 0; put each node behind the one that it follows"
        )
    deepest = int(TreeEntries.of(drafts, nodes).depths().max())
    if deepest >= width:
        raise ShapeError(
            f"{name}: expected paths of up to {width - 1} drafts, with those of the chain, "
            f"received one of {deepest}; windows narrow where rows end: leave out what is deeper"
        )


def has_tree(policy: object) -> bool:
    """Whether a policy verifies a tree."""
    return getattr(policy, "tree", None) is not None


def takes_capture(policy: object) -> bool:
    """Whether a policy verifies no tree, or one whose steps may be captured."""
    tree = getattr(policy, "tree", None)
    return not isinstance(tree, TreeShape) or tree.is_capturable


def count_spare(tree: object | None, model: TokenModel, widest: int) -> int:
    """Cache indices a row that a run needs beside those of its positions.

    Nodes stand behind the whole window, also in a row that is nearly at its end.
    """
    if not isinstance(tree, TreeShape) or not model.takes_trees:
        return 0
    return widest + tree.nodes
