"""Prompt files (JSON lines, a table or plain text), all of which `read_prompts` checks before any
image is generated, and `make_items`: one image each, with a seed of its own.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from mmaccel.catalog import POLICIES
from mmaccel.checks import check_choice, check_int, check_number, is_one, show
from mmaccel.errors import OptionError
from mmaccel.limits import (
    MAX_IMAGES,
    MAX_ITEMS,
    MAX_LINE,
    MAX_PROMPT,
    SEEDS,
    check_text,
    open_text,
    parse_json,
    read_stream,
    read_whole,
)
from mmaccel.loading import parse_size
from mmaccel.options import SAMPLING_FIELDS, read_text
from mmaccel.own_code import ONLY_TYPED, installed, is_module_name
from mmaccel.pipelines.models.scenes_vocabulary import split_words

FORMATS = ("jsonl", "csv", "txt")

_SPELLINGS = {  # of the command line, and of diffusers
    "negative_prompt": "negative",
    "num_images": "n",
    "num_images_per_prompt": "n",
    "count": "n",
    "guidance": "guidance_scale",
}
_SIDES = ("width", "height")  # of a size, as two columns
_SEPARATORS = ",;\t"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NOT_IN_ID = re.compile("[^A-Za-z0-9]+")
_NO_TEXT = re.compile(r"[\x00\ud800-\udfff]")
_WHOLE = re.compile(r"\s*(-?\d{1,20})(?:\.0*)?\s*")  # tables write 1.0 where a cell is empty
_TO_JSON = json.JSONEncoder(sort_keys=True).encode
_DIGITS = 12  # hexadecimal digits of a hash; in a million rows, two collide in 1 file of 500
_MAX_NAMED = 20  # wrong rows that a message names
_MAX_WRONG = 1_000  # after so many wrong rows, the file is not read further


@dataclass(frozen=True)
class Row:
    """One checked row of a prompt file.

    Attributes:
        id: unique in the file; letters, digits, `.`, `_` and `-`.
        negative: prompt of the unconditional branch; "" takes the model's own, None that of the
            command line, as of the policy and the voice.
        seed: of its first image; None, written -1 too, derives one from the id and the job's.
        params: fields of `SamplingParams` and of the policy that replace the command line's.
        line: line number in the file, from 1.
    """

    id: str
    prompt: str
    negative: str | None = None
    seed: int | None = None
    n: int = 1
    size: tuple[int, int] | None = None
    policy: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    line: int = 0
    voice: str | None = None


FIELDS = tuple(each.name for each in fields(Row) if each.name != "line")
_ALL = ", ".join((*FIELDS, *SAMPLING_FIELDS))


@dataclass(frozen=True)
class Item:
    """One image, clip or utterance to make: number k of its row, from 0. Without a name its file
    has one of id, index and seed.
    """

    row: Row
    k: int
    seed: int
    suffix: str = ".png"
    name: str = ""

    @property
    def key(self) -> tuple[str, int]:
        return self.row.id, self.k

    @property
    def file(self) -> str:
        return self.name or f"{self.row.id}_{self.k}_{self.seed}{self.suffix}"


def make_items(rows: Iterable[Row], base: int, suffix: str = ".png") -> list[Item]:
    """The items of a file, row by row; a row with a seed s of its own has s, s + 1, ..."""
    items = []
    for row in rows:
        for k in range(row.n):
            seed = seed_of(base, row.id, k) if row.seed is None else (row.seed + k) % SEEDS
            items.append(Item(row, k, seed, suffix))
    return items


def seed_of(base: int, id: str, k: int) -> int:
    """The seed of image k of a row: the first 64 bits of SHA-256 over (the job's `base`, id, k)."""
    text = json.dumps([base % SEEDS, id, k])
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")


def take_shard(items: list[Item], index: int, count: int) -> list[Item]:
    """Part `index` of 1..`count` parts of similar size; together they hold every item once."""
    return items[index - 1 :: count]


def read_prompts(source: str) -> list[Row]:
    """The rows of a prompt file, with unique ids, or an OptionError with the wrong rows' line
    numbers.

    A file is named `.jsonl`, `.csv`, `.tsv` or `.txt`; `-` is standard input, JSON lines where it
    begins with `{`, else one prompt a line. A row without an id gets one derived from its fields;
    the second of two equal rows gets `-2` after it, and so on.
    """
    title = "standard input" if source == "-" else f"--prompts {show(source)}"
    data, kind = _read(source, title)
    rows: list[Row] = []
    wrong: list[str] = []
    named = set()  # line numbers of rows with an id of their own
    for line, values in (_table if kind == "csv" else _lines)(data, kind, wrong):
        try:
            rows.append(check_row(values, line))
        except OptionError as error:
            wrong.append(f"line {line}: {error}")
        if values.get("id") is not None:
            named.add(line)
        if len(wrong) >= _MAX_WRONG:
            break
    rows = _make_ids_unique(rows, named, wrong)
    if wrong:
        least = "at least " * (len(wrong) >= _MAX_WRONG)
        raise OptionError(
            f"{title}: expected rows that can be read, received {least}{len(wrong)} that cannot. "
            f"{name_wrong(wrong)}"
        )
    if not rows:
        raise OptionError(f"{title}: expected at least one prompt, received none")
    images = sum(row.n for row in rows)
    if images > MAX_ITEMS:
        raise OptionError(
            f"{title}: expected at most {MAX_ITEMS} images, received {images} (n of all rows "
            "together); split the file"
        )
    return rows


def name_wrong(complaints: list[str]) -> str:
    """The first of many complaints, and how many more there are."""
    more = len(complaints) - _MAX_NAMED
    return ". ".join(complaints[:_MAX_NAMED]) + (f" (and {more} more)" if more > 0 else "")


def _read(source: str, title: str) -> tuple[bytes, str]:
    """The bytes of a prompt file, which are a text within the limits, and its format."""
    if source == "-":
        data = read_stream(sys.stdin.buffer, title)
        is_json = data[:MAX_LINE].removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"
        kind = "jsonl" if is_json else "txt"
    else:
        kind = Path(source).suffix.removeprefix(".").lower()
        kind = {"json": "jsonl", "ndjson": "jsonl", "tsv": "csv", "text": "txt"}.get(kind, kind)
        if kind not in FORMATS:
            raise OptionError(
                f"--prompts: expected a file named .jsonl, .csv or .txt, or -, received "
                f"{source!r}; rename it"
            )
        data = read_whole(source, "--prompts")
    check_text(data, title)
    return data, kind


def _lines(data: bytes, kind: str, wrong: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line number and fields of every row; complaints about lines without one go to `wrong`."""
    for line, content in enumerate(open_text(data), 1):
        content = content.strip()
        if not content:
            continue
        if kind == "txt":
            yield line, {"prompt": content}
            continue
        try:
            values = parse_json(content, unique_names=True)
            if not isinstance(values, dict):
                raise ValueError("no object in braces")
        except ValueError as error:
            wrong.append(
                f"line {line}: expected JSON, received {show(content)} ({error}); write one object "
                'a line, such as {"prompt": "a red circle"}'
            )
            continue
        yield line, values


def _table(data: bytes, kind: str, wrong: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    first = (data[:MAX_LINE].splitlines() or [b""])[0].decode("utf-8")
    separator = max(_SEPARATORS, key=first.count)  # no name of a field contains one
    csv.field_size_limit(MAX_LINE)
    reader = csv.reader(open_text(data, ""), delimiter=separator, strict=True)
    try:
        head = [spell(name.strip().lower().replace(" ", "_")) for name in next(reader, [])]
        if head and ("prompt" not in head or len(set(head)) < len(head)):
            wrong.append(
                f"line 1: expected a heading out of {_ALL}, each once, with prompt among them, "
                f"received {show(', '.join(head))}; rename or remove columns"
            )
            return
        for cells in reader:
            if len(cells) == len(head):
                yield reader.line_num, {name: cell for name, cell in zip(head, cells) if cell != ""}
            elif any(cell.strip() for cell in cells):
                wrong.append(
                    f"line {reader.line_num}: expected {len(head)} cells, received {len(cells)}; "
                    f"quote text that holds {separator!r}, leave no cell out, an empty one takes "
                    "the default"
                )
    except csv.Error as error:
        wrong.append(
            f"line {reader.line_num}: expected CSV, received other text ({error}); quote cells "
            "that hold quotes"
        )


def _make_ids_unique(rows: list[Row], named: set[int], wrong: list[str]) -> list[Row]:
    """Give derived ids a number where they repeat; an id that the file repeats goes to `wrong`."""
    lines: dict[str, int] = {}  # of an id; on some file systems a and A are one file
    for row in rows:
        first = lines.setdefault(row.id.casefold(), row.line) if row.line in named else row.line
        if first != row.line:
            wrong.append(
                f"line {row.line}: expected an id of its own, received {show(row.id)}, which "
                f"line {first} has"
            )
    numbers: dict[str, int] = {}  # the last one of a derived id
    unique = []
    for row in rows:
        name, number = row.id, numbers.get(row.id.casefold(), 1)
        while row.line not in named and name.casefold() in lines:
            number += 1
            name = f"{row.id}-{number}"
        if row.line not in named:
            numbers[row.id.casefold()] = number
            lines[name.casefold()] = row.line
        unique.append(row if name == row.id else replace(row, id=name))
    return unique


def check_row(values: Mapping[str, Any], line: int = 0) -> Row:
    """Check the fields of a row, None like a missing one, and derive its id where it has none.
    OptionError names the first wrong field, not the line.
    """
    gathered = _gather_fields({name: value for name, value in values.items() if value is not None})
    return make_row(line, **{name: _READERS[name](name, value) for name, value in gathered.items()})


def make_row(line: int = 0, **checked: Any) -> Row:
    row = Row(**{"id": "", **checked}, line=line)
    return row if row.id else replace(row, id=_make_id(row))


def spell(name: str) -> str:
    """The name of a field here, for one of its other names."""
    return _SPELLINGS.get(name, name)


def _gather_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields under their names here, a prompt among them; width and height are put into `size`,
    sampling parameters into `params`.
    """
    gathered: dict[str, Any] = {}
    params: dict[str, Any] = {}
    pairs = [(name, value) for name, value in values.items() if name not in _SIDES]
    if len(pairs) < len(values):
        pairs.append(("size", [values.get(name) for name in _SIDES]))
    for written, value in pairs:
        name = spell(written)
        if name in gathered or name in params:
            raise OptionError(
                f"{show(written)}: expected {name} once, received it twice; leave one out"
            )
        if name in SAMPLING_FIELDS:
            params[name] = _number(written, value)
        elif name in FIELDS:
            gathered[name] = value
        else:
            raise OptionError(f"{show(written)}: expected fields out of {_ALL}; leave it out")
    if params:
        named = _params("params", gathered.get("params", {}))
        for name in params.keys() & named.keys():
            raise OptionError(
                f"{name}: expected it once, received it in params too; leave one of them out"
            )
        gathered["params"] = {**named, **params}
    return {"prompt": "", **gathered}


def _make_id(row: Row) -> str:
    """An id for a row without one: its first three words and a hash of its fields alone."""
    hashed = {name: getattr(row, name) for name in FIELDS if name != "id"}
    if row.voice is None:  # the field is younger than ids
        del hashed["voice"]
    text = _TO_JSON(hashed)
    digits = hashlib.sha256(text.encode("utf-8")).hexdigest()[:_DIGITS]
    words = [_NOT_IN_ID.sub("", word)[:20] for word in split_words(row.prompt[:200])[:3]]
    return "-".join([*filter(None, words), digits])


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or _NO_TEXT.search(value):
        raise OptionError(
            f"{name}: expected text without NUL and surrogates, received {show(value)}; write it "
            "in quotes"
        )
    if len(value) > MAX_PROMPT:
        raise OptionError(
            f"{name}: expected at most {MAX_PROMPT} characters, received {len(value)}; shorten it"
        )
    return value


def _prompt(name: str, value: Any) -> str:
    text = _text(name, value)
    if not text.strip():
        raise OptionError("prompt: expected text, received none; write a prompt")
    return text


def _id(name: str, value: Any) -> str:
    text = str(value) if is_one(value, int) else value
    if not isinstance(text, str) or not _ID.fullmatch(text):
        raise OptionError(
            "id: expected 1 to 100 letters, digits, '.', '_' or '-', the first a letter or digit, "
            f"received {show(value)}; it becomes part of a file name"
        )
    return text


def _number(name: str, value: Any) -> Any:
    if isinstance(value, str):  # a CSV cell
        value = read_text(name, value, float)
    hint = "write one without quotes, with a point as in 0.5"
    check_number(name, value, -math.inf, math.inf, hint)
    return value


def _integer(low: int, high: int, name: str, value: Any) -> int:
    if isinstance(value, str) and (digits := _WHOLE.fullmatch(value)):
        value = int(digits[1])  # a CSV cell
    check_int(name, value, low, high, hint="write another one, or leave it out")
    return int(value)


def _seed(name: str, value: Any) -> int | None:
    """A seed; None, as without one, for -1."""
    value = _integer(-1, SEEDS - 1, name, value)
    return None if value == -1 else value


def _policy(name: str, value: Any) -> str:
    remedy = ONLY_TYPED if is_module_name(value) else "choose one of these"
    check_choice(name, value, (*POLICIES, *installed("policies")), hint=remedy)
    return str(value)


def _params(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):  # a CSV cell
        with suppress(ValueError):
            value = parse_json(value, unique_names=True)
    if not isinstance(value, dict):
        raise OptionError(
            f'{name}: expected names and values such as {{"temperature": 0.9}}, received '
            f"{show(value)}; write an object in braces"
        )
    return value


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "id": _id,
    "prompt": _prompt,
    "negative": _text,
    "seed": _seed,
    "n": partial(_integer, 1, MAX_IMAGES),
    "size": lambda name, value: parse_size(value, name),
    "policy": _policy,
    "params": _params,
    "voice": _text,
}
