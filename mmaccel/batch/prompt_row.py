"""One row of a prompt file: which fields there are, and what each may be."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from mmaccel.batch.item import SEEDS, Row
from mmaccel.catalog import POLICIES
from mmaccel.errors import OptionError
from mmaccel.pipelines.models.scenes_vocabulary import split_words

FIELDS = ("id", "prompt", "negative", "seed", "n", "size", "policy", "params")
LONGEST_PROMPT = 20_000  # characters; far beyond what any text encoder here reads
MOST_IMAGES = 100_000  # of one row

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)\.", re.IGNORECASE)
_SIZE = re.compile(r"\s*(\d{1,5})\s*(?:[xX]\s*(\d{1,5})\s*)?")
_MARK = 12  # hexadecimal digits; 2 of a million rows are told apart but for 1 file in 500
_SHOWN = 60  # characters of a value in a message


def check_row(values: Mapping[str, Any], line: int) -> Row:
    """Check a row's fields and give it an id where it has none.

    Args:
        values: by name; None and a missing field are the same.
        line: where it stands.

    Raises:
        OptionError: the first field that is wrong; the message does not name the line.
    """
    unknown = [str(name) for name in values if name not in FIELDS]
    if unknown:
        raise OptionError(
            f"{show(unknown[0])}: expected fields out of {', '.join(FIELDS)}; leave it out"
        )
    values = {name: value for name, value in values.items() if value is not None}
    prompt = _text("prompt", values.get("prompt"))
    if not prompt.strip():
        raise OptionError("prompt: expected a caption, received none; write one")
    negative = values.get("negative")
    fields: dict[str, Any] = {
        "prompt": prompt,
        "negative": None if negative is None else _text("negative", negative),
        "seed": _integer("seed", values["seed"], -(2**63), SEEDS - 1) if "seed" in values else None,
        "n": _integer("n", values.get("n", 1), 1, MOST_IMAGES),
        "size": _size(values.get("size")),
        "policy": _policy(values.get("policy")),
        "params": _params(values.get("params", {})),
    }
    own = values.get("id")
    return Row(name_of(fields) if own is None else _id(own), **fields, line=line)


def name_of(fields: Mapping[str, Any]) -> str:
    """An id for a row without one: readable words and a hash of all that it says.

    It depends on the row alone, so that a row that moves keeps its images.
    """
    text = json.dumps(dict(fields), sort_keys=True)
    mark = hashlib.sha256(text.encode("utf-8")).hexdigest()[:_MARK]
    words = ["".join(c for c in w if c.isascii() and c.isalnum())[:20] for w in _words(fields)]
    return "-".join([*filter(None, words), mark])


def show(value: Any) -> str:
    """A value from a file, safe and short enough for one line of a terminal."""
    if isinstance(value, str):
        value, quote = value[: _SHOWN + 1], "'"
        text = ascii(value)
    else:
        text, quote = ascii(value), ""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 4]}...{quote}"


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON whose names all differ; for `json.loads`.

    Raises:
        ValueError: a name stands there twice.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name stands there twice")
    return values


def _words(fields: Mapping[str, Any]) -> list[str]:
    return split_words(fields["prompt"][:200])[:3]


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise OptionError(f"{name}: expected text, received {show(value)}; write it in quotes")
    if len(value) > LONGEST_PROMPT:
        raise OptionError(
            f"{name}: expected at most {LONGEST_PROMPT} characters, received {len(value)}; "
            "shorten it"
        )
    if "\x00" in value or any("\ud800" <= c <= "\udfff" for c in value):
        raise OptionError(f"{name}: expected text, received {show(value)}; take out what is none")
    return value


def _id(value: Any) -> str:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not _ID.fullmatch(text):
        raise OptionError(
            "id: expected 1 to 100 letters, digits, '.', '_' or '-', the first a letter or digit, "
            f"received {show(value)}; it becomes part of a file's name"
        )
    if _DEVICE.match(text):
        raise OptionError(
            f"id: expected no name of a device of Windows before a dot, received {show(value)}; "
            "files cannot be named so there, change it"
        )
    return text


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,20}\s*", value):
        value = int(value)  # a cell of a table
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise OptionError(f"{name}: expected an integer in {low}..{high}, received {show(value)}")
    return value


def _size(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2:
        value = f"{value[0]}x{value[1]}"
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    found = _SIZE.fullmatch(text) if isinstance(text, str) else None
    width, height = (0, 0) if found is None else (int(found[1]), int(found[2] or found[1]))
    if not width or not height:
        raise OptionError(
            f"size: expected pixels such as 768 or '1024x768', received {show(value)}; "
            "width comes first"
        )
    return width, height


def _policy(value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or value not in POLICIES):
        raise OptionError(
            f"policy: expected one of {', '.join(POLICIES)}, received {show(value)}; "
            "choose one of these"
        )
    return value


def _params(value: Any) -> dict[str, Any]:
    if isinstance(value, str):  # a cell of a table
        try:
            value = json.loads(value, object_pairs_hook=once)
        except (ValueError, RecursionError):
            pass
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise OptionError(
            f'params: expected names and values such as {{"temperature": 0.9}}, received '
            f"{show(value)}"
        )
    return value
