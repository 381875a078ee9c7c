"""What can go wrong while items are made, told apart by whose fault it is."""

from __future__ import annotations

from collections.abc import Sequence

from mmaccel.batch.item import Item
from mmaccel.errors import MMAccelError


class WriteError(MMAccelError, OSError):
    """Something could not be written: no item's fault, and the end of a job."""


class ItemsFailed(MMAccelError, RuntimeError):
    """The model failed while it made items; the cause is what it raised.

    Attributes:
        items: those that were being made, one or more of which are to blame.
    """

    def __init__(self, items: Sequence[Item], cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.items = list(items)


class Outside(Exception):
    """Carries what went wrong with a finished image past the model, which is not to blame."""
