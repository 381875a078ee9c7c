"""Limits of what a command line and its files may ask for, and readers of files that keep them.

A value beyond a limit is refused before memory or time is spent on it. Each limit is far above what
is asked for in earnest and far below what a machine of 4 GB could not hold.
"""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import IO, Any

from mmaccel.errors import OptionError

# Counts.
MAX_ITEMS = 2_000_000  # images of a prompt file: a million prompts twice; 0.7 KB of memory each
MAX_IMAGES = 100_000  # of a row or of `--count`, which keep a list of them: a day on a GPU
MAX_MEASURED = 10_000  # images of a measurement, all in memory: an interval of 1 % needs as many
MAX_SAMPLES = 10_000_000  # sequences of the G-test: 200 times its default, ten minutes
MAX_BATCH = 65_536  # rows decoded together: 1000 times what fills the largest GPU
MAX_RUNS = 100_000  # of a speed measurement: percentiles stop changing long before
MAX_RETRIES = 1_000  # of an item: what failed so often will fail again
MAX_THREADS = 1_024  # of a CPU: the largest machines have as many cores
MAX_VALUES = 1_000  # of an option with commas: the catalog has 17 policies
MAX_SIDE = 16_384  # pixels: four times the widest image of a model here
MAX_PIXELS = 89_478_485  # of a picture: 256 MB in RGB, where Pillow warns; cameras have 61 million
MAX_TOGETHER = 2 * MAX_PIXELS  # of pictures decoded together: 45 pages at 200 dots an inch
MAX_KEPT = 4 * MAX_PIXELS  # of the frames of a clip that are kept together: nine of 8K
MAX_DECODED = 4 * 10**9  # pixels of all frames of an animation: ten minutes of 480x270

# Texts.
MAX_PROMPT = 20_000  # characters: far more than any text encoder here reads
MAX_VALUE = 10_000  # characters of a `--set` or a path: the longest is a tuple of token ids
MAX_EXPRESSION_DEPTH = 16  # brackets within brackets of a `--set`, whose deepest has one
SEEDS = 2**64  # keys of the noise, 0 and up
MAX_DIGITS = 40  # of an integer: a seed has 20, and no float holds one of 309
MAX_DEPTH = 64  # brackets within brackets of a JSON text: those of this library have up to 6

# Files.
MAX_FILE = 2**30  # bytes of a file of texts: a million prompts of 1 KB
MAX_LINE = 2**20  # bytes: two prompts of `MAX_PROMPT` characters, each written as \ud83d\ude00

_OPENING = "([{"
_QUOTED = re.compile(r""""(?:[^"\\]++|\\.)*+"?|'(?:[^'\\]++|\\.)*+'?""", re.DOTALL)
_BRACKETS = re.compile(r"[()\[\]{}]")


def read_whole(file: str | Path, option: str) -> bytes:
    """The bytes of a file of texts, or an OptionError: none regular, or more than `MAX_FILE`."""
    name = str(file)
    if not os.path.isfile(file):
        raise OptionError(
            f"{option}: expected a file that can be read, received {name!r}, which is none or no "
            "regular one; check the path"
        )
    try:
        with open(file, "rb") as opened:
            return read_stream(opened, f"{option} {name!r}")
    except OSError as error:
        raise OptionError(
            f"{option}: expected a file that can be read, received {name!r} ({error.strerror}); "
            "check its permissions"
        ) from error


def read_stream(stream: IO[bytes], what: str) -> bytes:
    """The bytes of a file or of standard input, or an OptionError above `MAX_FILE`."""
    data = stream.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise OptionError(
            f"{what}: expected at most {MAX_FILE} bytes, received more; split it into several"
        )
    return data


def check_text(data: bytes, what: str) -> None:
    """Raise OptionError, with the line's number, for bytes that are no text in UTF-8. Only line
    feeds end a line.
    """
    for number, line in enumerate(io.BytesIO(data), 1):
        try:
            str(line, "utf-8")
        except UnicodeDecodeError as error:
            raise OptionError(
                f"{what}: expected UTF-8, received the byte 0x{line[error.start]:02x} in line "
                f"{number}; save it as UTF-8"
            ) from error


def read_lines(file: str | Path, option: str) -> list[str]:
    """The lines of a file in UTF-8, with or without a byte order mark."""
    data = read_whole(file, option)
    check_text(data, f"{option} {str(file)!r}")
    return [line.removesuffix("\n") for line in open_text(data)]


def open_text(data: bytes, newline: str | None = None) -> io.TextIOWrapper:
    """Checked bytes as a text, decoded line by line, with or without a byte order mark; `newline`
    as in `open`, "" for CSV.
    """
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig", newline=newline)


def parse_json(text: str | bytes, *, unique_names: bool = False) -> Any:
    """The value of a JSON text of anybody's; ValueError for none, too deep a one, or too long an
    int.
    """
    if isinstance(text, bytes):
        text = str(text, "utf-8-sig")
    if is_deeper(text, MAX_DEPTH):
        raise ValueError(f"more than {MAX_DEPTH} brackets within brackets")
    hook = _to_object if unique_names else None
    return json.loads(text, parse_int=_to_int, object_pairs_hook=hook)


def is_deeper(text: str, most: int) -> bool:
    """Whether more than `most` brackets stand within brackets, outside quotes; in linear time."""
    if sum(map(text.count, _OPENING)) <= most:
        return False
    depth = 0
    for bracket in _BRACKETS.finditer(_QUOTED.sub("", text)):
        depth += 1 if bracket[0] in _OPENING else -1
        if depth > most:
            return True
    return False


def _to_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer of more than {MAX_DIGITS} digits")
    return int(digits)


def _to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name occurs twice")
    return values
