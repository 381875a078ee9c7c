"""Configuration files of checkpoints: JSON read within limits, and sizes checked against ranges.

A checkpoint is data from strangers. `read_json` answers whatever lies under a name in words: other
kinds of files, long or deep JSON, keys that occur twice. `check_ranges` holds the numbers of a
configuration against a family's table before anything is built from them.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from mmaccel.checks import Domain, check_value, domains, field_types
from mmaccel.errors import OptionError, UnsupportedModelError

Settings = TypeVar("Settings")

_SIZE = Domain()  # of a number that declares no other
LIMIT = 16 * 2**20  # bytes of a configuration
_DEPTH = 64  # nested lists and objects; published configurations have at most ten
_DIGITS = 100  # of an integer; transformers writes 31 for "no limit"
_SHOWN = 60  # characters of a value in a message
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def read_json(file: str | Path, limit: int = LIMIT, option: str = "model") -> dict[str, Any]:
    """Read a JSON object.

    Args:
        file: a regular file in UTF-8, or a link to one.
        limit: most bytes of it.
        option: name of the option in messages.

    Raises:
        UnsupportedModelError: no regular file, too long, no JSON object, a key twice, NaN, an
            integer of more than 100 digits, or more than 64 nested lists and objects.
    """
    file = Path(file)
    check_regular(file, option)
    try:
        with file.open("rb") as opened:
            data = opened.read(limit + 1)
        if len(data) > limit:
            raise ValueError(f"more than {limit} bytes")
        content = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_constant,
            parse_int=_whole,
        )
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__}")
        _check_depth(content)
    except RecursionError:
        received = f"more than {_DEPTH} nested lists and objects"
    except UnicodeDecodeError as error:
        received = f"bytes that are not UTF-8 (at {error.start})"
    except OSError as error:
        received = f"a file that cannot be read ({error.strerror})"
    except ValueError as error:
        received = " ".join(str(error).split())
    else:
        return content
    raise UnsupportedModelError(
        f"{option}: expected a JSON object in {file}, received {received}; copy the folder again"
    )


def check_regular(file: Path, option: str = "model") -> None:
    """Refuse what is no regular file, before it is opened: to open a FIFO would wait for ever.

    Raises:
        UnsupportedModelError: nothing, a folder, a FIFO, a socket or a device.
    """
    try:
        mode = os.stat(file).st_mode
    except OSError as error:
        received = f"none ({error.strerror})"
    else:
        if stat.S_ISREG(mode):
            return
        received = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
    name = file.name if file.name.isprintable() and len(file.name) <= _SHOWN else shorten(file.name)
    raise UnsupportedModelError(
        f"{option}: expected a file {name} in {file.parent}, received {received}; "
        "copy the folder again"
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"the key {shorten(name)} twice")
        content[name] = value
    return content


def _constant(text: str) -> float:
    if text == "NaN":
        raise ValueError("NaN")
    return float(text)


def _whole(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"an integer of {len(text)} digits, more than {_DIGITS}")
    return int(text)


def _check_depth(content: Any) -> None:
    level = [content]
    for _ in range(_DEPTH):
        inner = [value for value in level if isinstance(value, dict | list)]
        level = [v for value in inner for v in (value.values() if type(value) is dict else value)]
        if not level:
            return
    raise RecursionError


def shorten(value: Any) -> str:
    """A value as a message shows it: its `repr`, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def read_settings(
    kind: type[Settings], content: Mapping[str, Any], file: Path, option: str = "model"
) -> Settings:
    """A dataclass out of a file of settings, by the types and domains that its fields declare.

    Args:
        kind: the dataclass.
        content: of `read_json`. None means the default everywhere; names that are no fields are
            left out.
        file, option: for messages.

    Raises:
        UnsupportedModelError: see `read_value`.
    """
    cls: Any = kind
    kinds, known = field_types(cls), domains(cls)
    made = {}
    for each in fields(cls):
        if content.get(each.name) is not None or each.default is MISSING:
            domain = known.get(each.name, _SIZE)
            made[each.name] = read_value(content, each.name, kinds[each.name], file, option, domain)
    return kind(**made)


def read_value(
    content: Mapping[str, Any],
    name: str,
    kind: Any,
    file: Path,
    option: str = "model",
    domain: Domain = _SIZE,
) -> Any:
    """A value out of a file of settings, of a type; lists become tuples.

    Raises:
        UnsupportedModelError: none, or another one.
    """
    domain = replace(domain, hint="copy the folder again")
    try:
        return check_value(f"{option}: {name} in {file}", content.get(name), kind, domain)
    except OptionError as error:
        raise UnsupportedModelError(str(error)) from error


@dataclass(frozen=True)
class Range:
    """Values that a name of a configuration may have.

    Attributes:
        low, high: of each number. A list is checked number by number.
        is_whole: whether fractions are refused.
        length: most numbers of a list.
        product: greatest product of a list's numbers.
        numbers_only: False leaves values that are no numbers to the library that reads them.
    """

    low: float
    high: float
    is_whole: bool = True
    length: int = 64
    product: float = math.inf
    numbers_only: bool = True

    def accepts(self, value: Any) -> bool:
        """Whether a value, which is no None, lies in the range."""
        numbers = value if isinstance(value, list) else [value]
        types = (int,) if self.is_whole else (int, float)
        if any(type(n) not in types for n in numbers):
            return not self.numbers_only and not any(type(n) is float for n in numbers)
        inside = all(self.low <= n <= self.high for n in numbers)
        return inside and len(numbers) <= self.length and math.prod(numbers) <= self.product

    def __str__(self) -> str:
        """As messages show it."""
        kind = "whole numbers" if self.is_whole else "numbers"
        text = f"{kind} in {self.low:.10g}..{self.high:.10g}"
        if self.product < math.inf:
            text += f" with a product of at most {self.product:.10g}"
        return text


def check_ranges(
    config: Mapping[str, Any], ranges: Mapping[str, Range], file: Path, option: str = "model"
) -> None:
    """Check the numbers of a configuration, also of the configurations inside it.

    Args:
        config: of `read_json`. None means the default everywhere.
        ranges: by patterns of names; the first that matches a whole name counts.
        file: of the configuration, for messages.
        option: name of the option in messages.

    Raises:
        UnsupportedModelError: with the first name whose value is outside its range.
    """
    any_range = re.compile("|".join(f"(?:{pattern})" for pattern in ranges))
    for name, value in config.items():
        is_ours = any_range.fullmatch(name) is not None
        if isinstance(value, dict) and not is_ours:
            check_ranges(value, ranges, file, option)
        if value is None or not is_ours:
            continue
        found = next(r for pattern, r in ranges.items() if re.fullmatch(pattern, name))
        if not found.accepts(value):
            raise UnsupportedModelError(
                f"{option}: expected {name} as {found} in {file}, received {shorten(value)}; "
                "copy the folder again"
            )


def check_shapes(
    wanted: Mapping[str, Sequence[int]],
    found: Mapping[str, Sequence[int]],
    config: Path,
    weights: Path,
    option: str = "model",
) -> None:
    """Check that a file of tensors has those of a configuration, before a model is built.

    Args:
        wanted: shapes by name of the model that `config` describes.
        found: shapes by name of the tensors in `weights`.
        config, weights: files, for messages.
        option: name of the option in messages.

    Raises:
        UnsupportedModelError: with the first name that differs.
    """
    others = (k for k in sorted({*wanted, *found}) if wanted.get(k) != found.get(k))
    for name in others:
        shapes = wanted.get(name), found.get(name)
        asked, there = ("none" if shape is None else str(list(shape)) for shape in shapes)
        raise UnsupportedModelError(
            f"{option}: expected {shorten(name)} {asked}, as {config} asks, received {there} in "
            f"{weights.name}; copy both files again"
        )
