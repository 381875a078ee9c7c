"""A row of the tables of messages: a call that must be refused, and what the refusal must name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmaccel.errors import OptionError


@dataclass(frozen=True)
class Refused:
    """A call that must be refused before work.

    Attributes:
        name: of the case, unique in its table.
        call: without arguments; makes its models itself.
        says: substrings of the message, each of which must be there: what is wrong, what was
            received, what to do. Words that a user acts on, not whole sentences.
        error: class of the error.
    """

    name: str
    call: Callable[[], Any]
    says: tuple[str, ...]
    error: type[Exception] = OptionError
