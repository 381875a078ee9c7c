"""Checks of option values, shared by all public entry points.

Each raises `OptionError` with one line: the option's name, what was expected, what was received and
`hint`, which says how to repair the call. A bool is never accepted as a number. What a dataclass
takes is declared by its fields' types and by `within` and `one_of`; see `check_fields`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mmaccel.errors import MissingBackendError, NumericsError, OptionError, ShapeError

MANY = 2**20  # the end of numbers that name none: far above what is asked for in earnest
ANY_INT = 2**31 - 1  # of those that cost nothing however large they are
_MAX_SHOWN = 300  # characters of a value in a message
_CONTRACTS = "see docs/extending.md"


def show(value: Any) -> str:
    """`repr(value)` on one short line; arrays and tensors by their shape, integers of any size."""
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
    from difflib import get_close_matches

    near = get_close_matches(str(value)[:_MAX_SHOWN].lower(), list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else otherwise


def check_int(name: str, value: Any, low: float, high: float = MANY, *, hint: str) -> None:
    check_value(name, value, int, Domain(low, high, hint))


def check_number(
    name: str, value: Any, low: float, high: float, hint: str, *, above_low: bool = False
) -> None:
    check_value(name, value, float, Domain(low, high, hint, above_low))


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def check_most(option: str, value: int, most: int, remedy: str) -> None:
    if value > most:
        raise OptionError(f"{option}: expected at most {most}, received {show(value)}; {remedy}")


def check_length(option: str, values: Sequence[Any], most: int = 2 * MANY) -> None:
    """Raise OptionError for a sequence too long to walk through, such as `range(10**9)`."""
    try:
        count = len(values)
    except OverflowError:  # of a range
        raise OptionError(
            f"{option}: expected at most {most}, received {show(values)}; give fewer"
        ) from None
    check_most(option, count, most, "give fewer")


def check_choice(
    name: str, value: Any, choices: Collection[Any], *, hint: str = "choose one of these"
) -> None:
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        known = ", ".join(map(str, choices))
        raise OptionError(f"{name}: expected one of {known}, received {show(value)}; {hint}")


@dataclass(frozen=True)
class Domain:
    """What a field takes of its type.

    Attributes:
        low, high: of its numbers; a text names attributes of the same object whose sum it is, as
            "sinks + recent".
        hint: how to repair a call.
        above_low, below_high: the end itself is refused too.
        words: texts that it takes beside numbers.
        multiple_of: what divides its integers, or the attribute that does.
        fewest, ascends: of a tuple's values; that they do, and none is there twice.
    """

    low: float | str = 0
    high: float | str = MANY
    hint: str = "give another value"
    above_low: bool = False
    below_high: bool = False
    choices: Collection[Any] = ()
    words: tuple[str, ...] = ()
    multiple_of: int | str = 1
    odd: bool = False
    fewest: int = 0
    ascends: bool = False

    @property
    def related(self) -> dict[str, str]:
        numbers = {name: getattr(self, name) for name in ("low", "high", "multiple_of")}
        return {name: text for name, text in numbers.items() if isinstance(text, str)}

    def resolve(self, owner: Any) -> Domain:
        values = {
            name: sum(getattr(owner, part) for part in text.split(" + "))
            for name, text in self.related.items()
        }
        said = ", ".join(f"{text} is {values[name]}" for name, text in self.related.items())
        return replace(self, **values, hint=f"{said}; {self.hint}")

    def describe(self, kind: type, *, is_open: bool) -> str:
        """Its numbers in words; open: without an end that is only there for safety."""
        show_end = str if kind is int else "{:g}".format
        low, high = show_end(self.low), show_end(self.high)
        noun = "an integer" if kind is int else "a finite number" if is_open else "a number"
        if self.odd:
            noun = "an odd integer"
        elif self.multiple_of != 1:
            noun = f"a multiple of {self.multiple_of}"
        if is_open:
            is_any = isinstance(self.low, int | float) and self.low <= -MANY
            return noun if is_any else f"{noun} {'>' if self.above_low else '>='} {low}"
        if self.above_low or self.below_high:
            opening, closing = "[("[self.above_low], "])"[self.below_high]
            return f"{noun} in {opening}{low}, {high}{closing}"
        return f"{noun} in {low}..{high}"


ANY = Domain(-ANY_INT, ANY_INT)  # of a field that declares none
UNBOUNDED = Domain(-math.inf, math.inf)


def within(
    default: Any,
    low: float | str = 0,
    high: float | str = MANY,
    hint: str = Domain.hint,
    *,
    repr: bool = True,
    kw_only: Any = MISSING,
    **domain: Any,
) -> Any:
    """A field with a domain; further options are those of `Domain`."""
    metadata = {"domain": Domain(low, high, hint, **domain)}
    return field(default=default, repr=repr, kw_only=kw_only, metadata=metadata)


def one_of(default: Any, choices: Collection[Any], hint: str = "choose one of these") -> Any:
    return field(default=default, metadata={"domain": Domain(hint=hint, choices=choices)})


class Checked:
    def __post_init__(self) -> None:
        check_fields(self, f"{type(self).__name__}.")


def check_fields(owner: Any, prefix: str = "", otherwise: Domain = ANY) -> None:
    """Raise OptionError for the first value of a dataclass outside its field's type or domain,
    which is `otherwise` where it declares none. Lists become tuples.
    """
    cls: Any = type(owner)
    kinds, known = field_types(cls), domains(cls)
    related = []
    for each in fields(owner):
        domain = known.get(each.name, otherwise)
        if domain.related:
            related.append(each.name)
            domain = replace(domain, low=-MANY, high=MANY, multiple_of=1)
        given = getattr(owner, each.name)
        value = check_value(prefix + each.name, given, kinds.get(each.name, Any), domain)
        if value is not given:
            object.__setattr__(owner, each.name, value)
    for name in related:  # whose domains depend on other fields, which are numbers by now
        domain = known[name].resolve(owner)
        check_value(prefix + name, getattr(owner, name), kinds.get(name, Any), domain)


@cache
def field_types(cls: Any) -> dict[str, Any]:
    try:
        return get_type_hints(cls)
    except NameError:
        return {}


@cache
def domains(cls: Any) -> dict[str, Domain]:
    """The domains of a dataclass' fields; a child that has another default keeps its parent's."""
    by_name = {}
    for base in reversed(cls.__mro__):
        for each in base.__dict__.get("__dataclass_fields__", {}).values():
            if "domain" in each.metadata:
                by_name[each.name] = each.metadata["domain"]
    return by_name


def members(kind: Any) -> list[Any]:
    return list(get_args(kind)) if get_origin(kind) in (Union, UnionType) else [kind]


def check_value(name: str, value: Any, kind: Any, domain: Domain = ANY) -> Any:
    """A value of a type, lists and tensors as tuples, paths as texts; else an OptionError."""
    kinds = members(kind)
    if value is None and NoneType in kinds:
        return value
    kinds = [each for each in kinds if each is not NoneType] or kinds
    if get_origin(kinds[0]) is tuple and hasattr(value, "flatten"):  # a tensor or an array
        value = value.flatten().tolist()
    kind = next((each for each in kinds if is_one(value, each)), kinds[0])
    if str in kinds and isinstance(value, Path):
        return str(value)
    if kind is str and domain.words:
        if value in domain.words:
            return value
        kind = next(each for each in kinds if each is not str)
    if get_origin(kind) is Literal or kind is bool or domain.choices:
        known = domain.choices or get_args(kind) or (False, True)
        check_choice(name, value, known, hint=domain.hint)
    elif kind in (int, float):
        _check_number(name, value, kind, domain)
    elif not is_one(value, kind):
        names = {tuple: "list", NoneType: "None", Callable: "function"}
        shown = [names.get(get_origin(each) or each, each.__name__) for each in kinds]
        known = " or ".join(dict.fromkeys(shown))
        raise OptionError(f"{name}: expected a {known}, received {show(value)}; {domain.hint}")
    elif get_origin(kind) is tuple:
        check_length(name, value)
        inner, *more = get_args(kind)
        if len(value) < domain.fewest or more != [...] and len(value) != len(more) + 1:
            count = f"at least {domain.fewest}" if more == [...] else len(more) + 1
            raise OptionError(
                f"{name}: expected {count} values, received {show(value)}; {domain.hint}"
            )
        if inner is int and {int} == set(map(type, value)) and not domain.odd:
            # ids, of which there may be a million
            check_value(name, min(value), int, domain)
            check_value(name, max(value), int, domain)
            converted = tuple(value)
        else:
            converted = tuple(check_value(name, each, inner, domain) for each in value)
        if domain.ascends and list(converted) != sorted(set(converted)):
            raise OptionError(
                f"{name}: expected ascending values, received {show(value)}; {domain.hint}"
            )
        return value if converted == value else converted
    return value


def _check_number(name: str, value: Any, kind: type, domain: Domain) -> None:
    low: Any = domain.low
    high: Any = domain.high
    is_number = is_one(value, kind) and (kind is int or _is_finite(value))
    if is_number:
        is_above = value > low if domain.above_low else value >= low
        is_below = value < high if domain.below_high else value <= high
        divides = kind is float or value % domain.multiple_of == 0
        if is_above and is_below and divides and (not domain.odd or value % 2 == 1):
            return
    is_open = high >= MANY and not (is_number and value > high)
    expected = domain.describe(kind, is_open=is_open)
    raise OptionError(f"{name}: expected {expected}, received {show(value)}; {domain.hint}")


def is_one(value: Any, kind: Any) -> bool:
    if kind in (int, float):
        number = Integral if kind is int else Real
        return isinstance(value, number) and not isinstance(value, bool)
    if get_origin(kind) is Callable:
        return callable(value)
    if get_origin(kind) is tuple:
        return isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if get_origin(kind) is Literal:
        return isinstance(value, str | int | None) and value in get_args(kind)
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True  # of which nothing can be asked
    return isinstance(value, kind)


@contextmanager
def importing(message: str) -> Iterator[None]:
    """Imports of an optional package; what fails inside is a MissingBackendError."""
    try:
        yield
    except ImportError as error:
        raise MissingBackendError(message) from error


def check_callable(name: str, value: Any) -> None:
    check_value(name, value, Callable[..., Any] | None, Domain(hint="leave it out"))


def check_path(
    name: str, path: str | Path, kind: Literal["file", "folder"], *, hint: str = "check the path"
) -> None:
    exists = os.path.isfile(path) if kind == "file" else os.path.isdir(path)
    if not exists:
        raise OptionError(f"{name}: expected a {kind}, received {str(path)!r}; {hint}")


def check_kind(name: str, found: Any, kind: type, hint: str = _CONTRACTS) -> Any:
    """What a method of somebody else returned, an object of a class; else a ShapeError."""
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
    """What a method of somebody else returned, a tensor; else a ShapeError, or NumericsError for
    NaN.

    Args:
        shape: expected; the second of three or more axes may be 1, for all heads or slots.
        dtype: "float" of any width, "int64" or "bool".
        counts: bool, broadcastable, where NaN is refused; None: nowhere.
        within: the least and the largest integer; None: any.

    Cost: a host synchronisation with `counts` or `within`.
    """
    size = list(getattr(found, "shape", ()))
    kind = str(getattr(found, "dtype", ""))
    shapes = [list(shape)]
    if len(shape) > 2:
        shapes.append([shape[0], 1, *shape[2:]])
    if size not in shapes or dtype not in kind or not kind.startswith("torch."):
        received = f"{size} of {kind}" if kind else f"a {type(found).__name__}"
        kinds = f" of {dtype}" if dtype else ""
        raise ShapeError(f"{name}: expected {shapes[0]}{kinds}, received {received}; {hint}")
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
