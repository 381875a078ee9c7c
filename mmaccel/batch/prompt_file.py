"""Prompt files: JSON lines, CSV or plain text, read whole and checked whole before any work."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmaccel.batch.item import Row
from mmaccel.batch.prompt_row import FIELDS, check_row, once, show
from mmaccel.errors import OptionError

FORMATS = ("jsonl", "csv", "txt")
MOST_ITEMS = 1_000_000  # a process keeps 0.7 KB of memory of each (measured)
_NAMED = 20  # bad rows a message names
_CELL = 64 * 2**20  # characters of a cell that csv reads at all


def read_prompts(source: str) -> list[Row]:
    """Read a prompt file.

    Args:
        source: a file named `.jsonl`, `.csv` or `.txt`, or `-` for standard input, which is JSON
            lines where it begins with `{`, and one prompt a line where it does not.

    Returns:
        Rows in the file's order, with unique ids. A row without an id gets one made of what it
        says; the second of two alike gets `-2` behind it, and so on.

    Raises:
        OptionError: no such file, not UTF-8, no rows; or rows that are wrong, each with its line.
    """
    text, kind = _read(source)
    rows: list[Row] = []
    wrong: list[str] = []
    named = set()  # lines with an id of their own
    for line, values in _rows(text, kind, wrong):
        try:
            rows.append(check_row(values, line))
        except OptionError as error:
            wrong.append(f"line {line}: {error}")
        if values.get("id") is not None:
            named.add(line)
    rows = _tell_apart(rows, named, wrong)
    if wrong:
        more = f" (and {len(wrong) - _NAMED} more)" if len(wrong) > _NAMED else ""
        raise OptionError(
            f"{_title(source)}: expected rows that can be read, received {len(wrong)} that cannot. "
            + ". ".join(wrong[:_NAMED])
            + more
        )
    if not rows:
        raise OptionError(f"{_title(source)}: expected at least one prompt, received none")
    images = sum(row.n for row in rows)
    if images > MOST_ITEMS:
        raise OptionError(
            f"{_title(source)}: expected at most {MOST_ITEMS} images, received {images} (n of "
            "all rows together); split the file"
        )
    return rows


def _read(source: str) -> tuple[str, str]:
    if source == "-":
        data = sys.stdin.buffer.read()
        kind = "jsonl" if data.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{" else "txt"
    else:
        kind = Path(source).suffix.removeprefix(".").lower()
        kind = {"json": "jsonl", "ndjson": "jsonl", "text": "txt"}.get(kind, kind)
        if kind not in FORMATS:
            raise OptionError(
                f"--prompts: expected a file named .jsonl, .csv or .txt, or -, received "
                f"{source!r}; rename it"
            )
        try:
            data = Path(source).read_bytes()
        except OSError as error:
            raise OptionError(
                f"--prompts: expected a file that can be read, received {source!r} "
                f"({error.strerror})"
            ) from error
    try:
        return data.decode("utf-8-sig"), kind
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise OptionError(
            f"{_title(source)}: expected UTF-8, received the byte 0x{data[error.start]:02x} in "
            f"line {line}; save it as UTF-8"
        ) from error


def _rows(text: str, kind: str, wrong: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows with their lines; what is no row at all goes to `wrong`."""
    if kind == "csv":
        yield from _table(text, wrong)
        return
    # not splitlines: a prompt may hold characters that it takes for ends of lines
    for line, content in enumerate(text.split("\n"), 1):
        content = content.strip()
        if not content:
            continue
        if kind == "txt":
            yield line, {"prompt": content}
            continue
        try:
            values = json.loads(content, object_pairs_hook=once)
        except (ValueError, RecursionError) as error:
            wrong.append(f"line {line}: expected JSON, received {show(content)} ({error})")
            continue
        if isinstance(values, dict):
            yield line, values
        else:
            wrong.append(f"line {line}: expected an object in braces, received {show(content)}")


def _table(text: str, wrong: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    previous = csv.field_size_limit(_CELL)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        head = [name.strip() for name in next(reader, [])]
        if not head:
            return
        if "prompt" not in head or len(set(head)) < len(head):
            wrong.append(f"line 1: expected a heading out of {', '.join(FIELDS)}, each once, with "
                         f"prompt among them, received {show(', '.join(head))}")  # fmt: skip
            return
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(head):
                wrong.append(f"line {reader.line_num}: expected {len(head)} cells, received "
                             f"{len(cells)}; quote text with commas, leave no cell out, an empty "
                             "one is the default")  # fmt: skip
                continue
            yield reader.line_num, {name: cell for name, cell in zip(head, cells) if cell != ""}
    except csv.Error as error:
        wrong.append(f"line {reader.line_num}: expected CSV ({error})")
    finally:
        csv.field_size_limit(previous)


def _tell_apart(rows: list[Row], named: set[int], wrong: list[str]) -> list[Row]:
    """Unique ids: a given one twice is wrong, a made one is counted on."""
    first: dict[str, int] = {}
    for row in rows:
        if row.line in named:
            key = row.id.casefold()  # some file systems do not tell a from A
            if key in first:
                wrong.append(f"line {row.line}: expected an id of its own, received "
                             f"{show(row.id)}, which line {first[key]} has")  # fmt: skip
            first.setdefault(key, row.line)
    found, seen = [], dict.fromkeys(first, 1)
    for row in rows:
        name = row.id
        if row.line not in named:
            n = 1
            while name.casefold() in seen:
                n += 1
                name = f"{row.id}-{n}"
            seen[name.casefold()] = 1
        found.append(replace(row, id=name))
    return found


def _title(source: str) -> str:
    return "standard input" if source == "-" else f"--prompts {show(source)}"
