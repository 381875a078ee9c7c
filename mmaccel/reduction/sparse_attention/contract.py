"""The contract of sparse attention: summarise blocks of cached keys, score them, attend to some.

A method is a frozen dataclass with `summarise` and `score`; it may have a `select` of its own. The
executor (`mmaccel.pipelines.layers.sparse`) keeps the summaries: they follow the cache as it is
written, and a window that is rolled back is summarised anew. The blocks of the window itself and
the first block are always attended to. Nothing is evicted, so that the next pass may choose other
blocks.

All methods are relaxed, and what a pass attends to depends on all queries of its window: a policy
on top is measured, not proven, unless the budget covers everything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmaccel.checks import check_int, check_number
from mmaccel.contracts import Method
from mmaccel.reduction.ranking import choose_highest
from mmaccel.results import Exactness


@dataclass(frozen=True)
class AttentionMethod(Method, ABC):
    """Base of all methods that choose blocks of keys.

    Shapes: **R** rows, **H** key heads, **G** query heads a key head, **W** window, **N** blocks,
    **P** positions of a block, **D** head width, **C** numbers of a summary.

    Args:
        budget: the fraction of a row's blocks that a pass attends to, in (0, 1]; 1 changes nothing.
        block: P.
        first_layer: layers before it attend to everything.

    Raises:
        OptionError: a value out of range.
    """

    budget: float = 0.1
    block: int = 16
    first_layer: int = 2

    exactness: ClassVar[Exactness] = "relaxed"
    slot: ClassVar[str] = "attention"

    def __post_init__(self) -> None:
        hint = "give the fraction of blocks that a pass attends to; 1 attends to all"
        check_number(f"{self.name}.budget", self.budget, 0, 1, hint, above_low=True)
        check_int(f"{self.name}.block", self.block, 1, 1024, hint="16 suits most models")
        check_int(f"{self.name}.first_layer", self.first_layer, 0, hint="2 suits most models")

    @property
    def name(self) -> str:
        """The method's name."""
        return type(self).__name__

    @abstractmethod
    def summarise(self, keys: Tensor, is_real: Tensor) -> Tensor:
        """Summaries of blocks.

        Args:
            keys: `[R, H, N, P, D]`.
            is_real: `[R, 1, N, P, 1]` bool, False for entries that hold nothing yet.

        Returns:
            `[R, H, N, C]`.
        """

    @abstractmethod
    def score(self, queries: Tensor, summaries: Tensor) -> Tensor:
        """`[R, H, N]`, how much the window wants each block.

        Args:
            queries: `[R, H, G W, D]`.
            summaries: `[R, H, N, C]`.
        """

    def select(self, scores: Tensor, is_kept: Tensor, counts: Tensor) -> Tensor:
        """`[R, H, N]` bool, the blocks to attend to.

        Args:
            scores: of `score`; -inf for blocks that hold nothing.
            is_kept: `[R, 1, N]` bool, blocks that are attended to in any case.
            counts: `[R]` int64, blocks that hold something.
        """
        wanted = (counts * self.budget).ceil().long()[:, None, None]
        scores = scores.masked_fill(is_kept, float("inf"))
        most = int((scores.shape[2] * self.budget) + 1)
        return choose_highest(scores, wanted, min(most, scores.shape[2])) | is_kept
