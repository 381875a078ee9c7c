"""Rows of the tables of refusals: a call as users make it, what it says, and what is done then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmaccel.errors import OptionError

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Refused:
    """A call that is refused.

    Attributes:
        name: of the test.
        target: opens what is called.
        wrong: arguments of the call.
        says: words of the message: what is wrong, what to do.
        instead: arguments in place of some of `wrong`, with which the call goes; None where the
            remedy is another model or another code.
        error: class of the error.
        before_passes: whether no module runs before the refusal.
    """

    name: str
    target: Callable[[], Callable[..., Any]]
    wrong: Arguments
    says: tuple[str, ...]
    instead: Arguments | None
    error: type[Exception]
    before_passes: bool


def table(
    target: Callable[..., Callable[..., Any]],
    *rows: tuple[Any, ...],
    error: type[Exception] = OptionError,
    before_passes: bool = False,
    of: Any = None,
) -> list[Refused]:
    """Refusals of one target.

    Args:
        rows: wrong arguments, words of the message between " … ", arguments instead.
        error: class of the errors of all rows; a row may give its own as the fourth value.
        before_passes: see `Refused`.
        of: an argument of `target`.
    """
    made = []
    for wrong, says, instead, *own in rows:
        name = f"{target.__name__} {of or ''} {wrong}"[:100].encode("ascii", "replace").decode()
        opens = target if of is None else (lambda: target(of))
        kind = own[0] if own else error
        made.append(
            Refused(name, opens, wrong, tuple(says.split(" … ")), instead, kind, before_passes)
        )
    return made
