"""What fields declare is what their classes take: every value beyond a range, or of another type,
is refused with the field's name, what it takes, and what it was given.

The classes are all dataclasses that `mmaccel` offers, so that a new one is tested by its fields.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from inspect import isabstract
from typing import Any, Literal, get_args, get_origin

import pytest

import mmaccel
from mmaccel import FastVAR
from mmaccel.checks import MANY, Domain, domains, field_types, members, show
from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.runner.engine import Engine
from tests.fixtures.toy_models import ToyLanguage

REQUIRED: dict[str, Any] = {  # values of fields that have none, by name
    "keep": 0.5, "folder": "a", "model": ToyLanguage(), "tokens": (1, 2), "rows": 2, "width": 2,
    "vocab_size": 9, "ranges": ((1, 3),), "penalty": 1.1, "window": 8, "mask_token": 0,
    "n_sigma": 1.0, "theta": 0.5,
}  # fmt: skip


def _offered() -> Iterator[Any]:
    yield Engine
    for name in mmaccel.__all__:
        found = getattr(mmaccel, name)
        if isinstance(found, type) and is_dataclass(found) and not isabstract(found):
            yield found


def _make(cls: Any, **changes: Any) -> Any:
    """An object with values of its own for what has no default."""
    own = [
        each
        for each in fields(cls)
        if each.default is MISSING or each.name == "keep" and cls is not FastVAR
    ]
    needed = {each.name: REQUIRED[each.name] for each in own if each.init}
    if "n_keep" in changes:
        del needed["keep"]
    return cls(**needed | changes)


def _beyond(kind: Any, domain: Domain) -> Iterator[Any]:
    """Values that a field of a type does not take, alone or in a list."""
    step = 1 if kind is int else 0.001
    low: Any = domain.low
    high: Any = domain.high
    if low > -MANY:
        yield low if domain.above_low else low - step
    if high < MANY:
        yield high if domain.below_high else high + step
    if domain.multiple_of != 1 or domain.odd:
        yield low * 2 + 1 if not domain.odd else 2
    yield from (True, [1]) if kind is int else (True, math.nan, [1])
    if kind is int:
        yield 1.5
    if str not in (kind, *map(type, domain.choices)):
        yield "nothing"


def _wrong(kind: Any, domain: Domain) -> Iterator[tuple[Any, Any]]:
    """Values that a field does not take, and what of each a message shows."""
    kinds = [each for each in members(kind) if each is not type(None)]
    first = next((each for each in kinds if each in (int, float)), kinds[0] if kinds else None)
    if domain.choices or first is bool or get_origin(first) is Literal:
        for value in ("nothing", 3, 0.5):
            yield value, value
    elif first in (int, float):
        for value in _beyond(first, domain):
            yield value, value
    elif get_origin(first) is tuple:
        yield 7, 7
        if domain.fewest:
            yield (), ()
        inner, *others = get_args(first)
        count = 1 if others == [...] else 1 + len(others)
        if inner in (int, float):
            for value in _beyond(inner, domain):
                is_whole = type(value) is int
                yield [value + k if is_whole else value for k in range(count)], value
    elif isinstance(first, type):
        value = 3 if first is str else object
        yield value, value


CASES = [
    pytest.param(cls, name, id=f"{cls.__name__}.{name}")
    for cls in _offered()
    for name in domains(cls)
    if any(each.name == name and each.init for each in fields(cls))
]


@pytest.mark.parametrize(("cls", "name"), CASES)
def test_a_field_takes_what_it_declares(cls: Any, name: str) -> None:
    usual = _make(cls)
    declared = domains(cls)[name]
    domain = declared.resolve(usual)
    for value, shown in _wrong(field_types(cls)[name], domain):
        with pytest.raises(OptionError) as caught:
            _make(cls, **{name: value})
        message = str(caught.value)
        assert f"{name}: expected" in message, (value, message)
        assert f"received {show(shown)}" in message and message.endswith(declared.hint)


@pytest.mark.parametrize(("cls", "name"), CASES)
def test_a_field_takes_the_ends_of_its_range(cls: Any, name: str) -> None:
    domain = domains(cls)[name].resolve(_make(cls))
    if domain.choices:
        return
    kind = next((each for each in members(field_types(cls)[name]) if each in (int, float)), None)
    ends = [(domain.low, domain.above_low), (domain.high, domain.below_high)]
    for end, is_refused in ends:
        if kind is None or is_refused or abs(end) >= MANY or end % domain.multiple_of:
            continue
        if domain.odd and end % 2 == 0:
            continue
        try:
            _make(cls, **{name: end})
        except OptionError as error:  # other fields may depend on this one
            assert f"{name}: expected" not in str(error)
