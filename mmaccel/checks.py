"""Checks of option values, shared by all public entry points.

Each check raises `OptionError` with one line: the option's name, what was expected, what was
received and `hint`, which says how to repair the call. A bool is never accepted as a number.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

from mmaccel.errors import MissingBackendError, NumericsError, OptionError, ShapeError

_MAX_SHOWN = 300  # characters of a value in a message
_CONTRACTS = "see docs/extending.md"


def show(value: Any) -> str:
    """`repr(value)` for a message, on one line and shortened.

    Python refuses to write integers of 4300 digits; arrays and tensors are named by their shape.
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape and hasattr(value, "dtype"):
        return f"a {type(value).__name__} {list(shape)} of {value.dtype}"
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that is too long to print"
    text = " ".join(line.strip() for line in text.splitlines())
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def suggest(value: Any, known: Iterable[str], otherwise: str) -> str:
    """ "did you mean …?" where one of the known names resembles a value, else `otherwise`."""
    from difflib import get_close_matches

    near = get_close_matches(str(value)[:_MAX_SHOWN].lower(), list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else otherwise


def check_int(name: str, value: Any, low: int, high: int | None = None, *, hint: str) -> None:
    """Raise OptionError unless `value` is an integer in low..high; `high=None` sets no limit."""
    is_int = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        domain = f">= {low}" if high is None else f"in {low}..{high}"
        raise OptionError(f"{name}: expected an integer {domain}, received {show(value)}; {hint}")


def check_number(
    name: str, value: Any, low: float, high: float, hint: str, *, above_low: bool = False
) -> None:
    """Raise OptionError unless `value` is a finite number in low..high.

    Args:
        name: the option's name.
        value: what the caller gave.
        low: the least value.
        high: the greatest value, `math.inf` for no limit.
        hint: how to repair the call.
        above_low: `low` itself is refused too.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and _is_finite(value) and low <= value <= high:
        if not above_low or value > low:
            return
    if low == -math.inf:
        expected = "a finite number"
    elif high == math.inf:
        expected = f"a finite number {'>' if above_low else '>='} {low:g}"
    else:
        expected = f"a number {f'in ({low:g}, {high:g}]' if above_low else f'in {low:g}..{high:g}'}"
    raise OptionError(f"{name}: expected {expected}, received {show(value)}; {hint}")


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def check_choice(
    name: str, value: Any, choices: Collection[Any], *, hint: str = "choose one of these"
) -> None:
    """Raise OptionError unless `value` is one of `choices`, of the same type."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        known = ", ".join(map(str, choices))
        raise OptionError(f"{name}: expected one of {known}, received {show(value)}; {hint}")


@contextmanager
def importing(message: str) -> Iterator[None]:
    """Imports of an optional package, which users install for what needs it.

    Args:
        message: what was expected, received, and how to install it.

    Raises:
        MissingBackendError: an import inside failed.
    """
    try:
        yield
    except ImportError as error:
        raise MissingBackendError(message) from error


def check_callable(name: str, value: Any) -> None:
    """Raise OptionError unless `value` is None or can be called."""
    if value is not None and not callable(value):
        raise OptionError(
            f"{name}: expected a function or None, received {show(value)}; leave it out"
        )


def check_path(
    name: str, path: str | Path, kind: Literal["file", "folder"], *, hint: str = "check the path"
) -> None:
    """Raise OptionError unless `path` names an existing file or folder, as `kind` asks."""
    exists = os.path.isfile(path) if kind == "file" else os.path.isdir(path)
    if not exists:
        raise OptionError(f"{name}: expected a {kind}, received {str(path)!r}; {hint}")


def check_kind(name: str, found: Any, kind: type, hint: str = _CONTRACTS) -> Any:
    """What a method of somebody else returned, an object of a class.

    Raises:
        ShapeError: anything else; `name` is that of the class and the method.
    """
    if not isinstance(found, kind):
        received = f"received a {type(found).__name__}"
        raise ShapeError(f"{name}: expected a {kind.__name__}, {received}; {hint}")
    return found


def check_answer(
    name: str,
    found: Any,
    shape: Sequence[int],
    dtype: str,
    hint: str = _CONTRACTS,
    *,
    counts: Any = None,
    within: tuple[int, int] | None = None,
) -> Any:
    """What a method of somebody else returned, a tensor.

    Args:
        name: of the class and the method.
        found: what it returned.
        shape: expected; the second of three or more axes may be 1, for all heads or slots.
        dtype: "float" of any width, "int64" or "bool".
        hint: how to repair the method.
        counts: bool, broadcastable, where NaN is refused; None: nowhere.
        within: the least and the largest integer; None: any.

    Raises:
        ShapeError: anything else.
        NumericsError: NaN.

    Cost: a host synchronisation with `counts` or `within`.
    """
    size = list(getattr(found, "shape", ()))
    kind = str(getattr(found, "dtype", ""))
    shapes = [list(shape)]
    if len(shape) > 2:
        shapes.append([shape[0], 1, *shape[2:]])
    if size not in shapes or dtype not in kind or not kind.startswith("torch."):
        received = f"{size} of {kind}" if kind else f"a {type(found).__name__}"
        raise ShapeError(f"{name}: expected {shapes[0]} of {dtype}, received {received}; {hint}")
    if counts is not None and bool((found.isnan() & counts).any()):
        raise NumericsError(
            f"{name}: expected numbers, received NaN; check its arithmetic, then the model's dtype"
        )
    if within is not None and found.numel():
        low, high = found.aminmax()
        if low < within[0] or high > within[1]:
            received = f"received {low}..{high}"
            raise ShapeError(f"{name}: expected {within[0]}..{within[1]}, {received}; {hint}")
    return found
