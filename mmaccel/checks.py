"""Checks of the numbers that selectors and policies of canvas decoding take."""

from __future__ import annotations

import math
from typing import Any

from mmaccel.errors import OptionError


def check_number(name: str, value: Any, low: float, high: float, hint: str) -> None:
    """Refuse what is no finite number in low..high.

    Raises:
        OptionError: with the domain and `hint`.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and low <= value <= high):
        domain = f">= {low:g}" if high == math.inf else f"in {low:g}..{high:g}"
        kind = "a finite number" if high == math.inf else "a number"
        raise OptionError(f"{name}: expected {kind} {domain}, received {value!r}; {hint}")


def check_integer(name: str, value: Any, low: int, hint: str) -> None:
    """Refuse what is no integer of `low` or more.

    Raises:
        OptionError: with the domain and `hint`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise OptionError(f"{name}: expected an integer >= {low}, received {value!r}; {hint}")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Refuse what is none of `choices`.

    Raises:
        OptionError: with the choices.
    """
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        known = ", ".join(map(str, choices))
        raise OptionError(
            f"{name}: expected one of {known}, received {value!r}; choose one of these"
        )
