"""Places: a prompt of more rows than are decoded at a time, and what is told of each that ended.

G.-I. Yu et al. ("Orca: A Distributed Serving System for Transformer-Based
Generative Models", OSDI 2022, section 3, iteration-level scheduling) let a request join a batch as
soon as another has left it; here the unit is a pass of a window or over a canvas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mmaccel.errors import OptionError


@dataclass(frozen=True)
class EndedRow:
    """A row that has ended while others may go on.

    Attributes:
        row: which of the prompt.
        tokens: `[n]` int64, those that were made.
        passes: passes it took part in.
        accepted: as in `Stats`, of this row.
        total_variation, nats: as in `Stats`, of this row.
    """

    row: int
    tokens: Tensor
    passes: int
    accepted: list[int]
    total_variation: float
    nats: float = 0.0


@dataclass(frozen=True)
class Places:
    """Fewer places than a prompt has rows: when a row ends, the next one takes its place.

    Args:
        rows: most rows that are decoded at a time, at least 1.
        deliver: given every row as soon as it has ended; an exception from it stops the run and
            reaches the caller.

    Raises:
        OptionError: rows < 1.
    """

    rows: int
    deliver: Callable[[EndedRow], None] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 1:
            raise OptionError(
                f"rows: expected an integer of at least 1, received {self.rows!r}; try 8"
            )
