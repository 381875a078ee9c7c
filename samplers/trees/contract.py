"""The contract of trees: what a pass verifies beside the chain of a window's drafts.

A `TreeShape` is configuration: a frozen dataclass that a policy carries in its field `tree`. Before
a pass it asks the run's drafter for branches: other drafts that leave the chain somewhere. The pass
then covers the window and, behind it, all branches; an entry attends to those that it follows.

With the noise of slots held fixed, one token is right at every slot, so that at most one child of
an entry is. What was accepted is then a path: the chain up to a fork, and a branch from there on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmaccel.checks import show
from mmaccel.contracts import TokenModel
from mmaccel.errors import OptionError
from mmaccel.samplers.drafting.contract import Branches, Drafter, DraftSource, OpenRun


@dataclass(frozen=True)
class TreeShape(ABC):
    """Base of tree shapes."""

    name: ClassVar[str] = ""

    @property
    @abstractmethod
    def nodes(self) -> int:
        """Entries that a pass has beside its window."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Entries of the longest branch."""

    @abstractmethod
    def grow(
        self, run: OpenRun, drafter: Drafter, drafts: Tensor, noise: Tensor
    ) -> Branches | None:
        """Branches beside the chain of a window; None for a pass without.

        Args:
            drafter: of the run.
            run: whose token buffer holds the chain's drafts.
            drafts: `[B, W-1]` int64, the chain.
            noise: frozen noise of the draft slots, `[B, W-1, V]`; zeros `[B, W-1, 1]` at
                temperature 0.
        """


def check_tree(tree: object, window: int | str, source: DraftSource) -> None:
    """Refuse a tree that a policy cannot have.

    Args:
        tree: of the policy.
        window: of the policy.
        source: of its drafts.

    Raises:
        OptionError: no tree; a window that changes, or is too narrow; drafts without alternatives.
    """
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
    if not source.has_branches:
        raise OptionError(
            f"tree: expected drafts that have alternatives, received {source!r}; take "
            "drafts='coarse', drafts='token-recycling' or leave tree out"
        )


def has_tree(policy: object) -> bool:
    """Whether a policy verifies a tree."""
    return getattr(policy, "tree", None) is not None


def count_spare(tree: object | None, model: TokenModel, widest: int) -> int:
    """Cache indices a row that a run needs beside those of its positions.

    Branches stand behind the whole window, also in a row that is nearly at its end.
    """
    if not isinstance(tree, TreeShape) or not model.takes_trees:
        return 0
    return widest + tree.nodes
