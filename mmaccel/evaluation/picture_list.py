"""`prompts.jsonl`: what the files of a folder were made from, where they do not say it themselves.

A line each: `{"file": "a.png", "prompt": "…", "seed": 0}`; the seed, and more, as you like.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmaccel.errors import OptionError

LIST = "prompts.jsonl"


def read_list(file: Path) -> dict[str, dict[str, Any]]:
    """`prompts.jsonl` by file name; empty where there is none.

    Raises:
        OptionError: a line that is no object with `file` and `prompt`, a file named twice, or one
            that is not there; with the line's number.
    """
    told: dict[str, dict[str, Any]] = {}
    if not file.is_file():
        return told
    for number, line in enumerate(read_lines(file), 1):
        if not line.strip():
            continue
        try:
            facts = json.loads(line)
        except ValueError:
            facts = None
        _check_line(file, number, line, facts)
        if facts["file"] in told:
            raise OptionError(
                f"{file.name}: expected each file once, received {facts['file']!r} again on line "
                f"{number}; take one of the lines out"
            )
        told[facts["file"]] = facts
    return told


def read_lines(file: Path) -> list[str]:
    """The lines of a text in UTF-8. Only line feeds end one: within JSON and captions, what Unicode
    takes for the end of a line may stand.

    Raises:
        OptionError: no text.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8"
        raise OptionError(
            f"text: expected a file in UTF-8, received {str(file)!r} ({reason}); check the path"
        ) from error
    return lines[:-1] if lines[-1] == "" else lines


def _check_line(file: Path, number: int, line: str, facts: Any) -> None:
    """Refuse a line that is no object with texts `file`, of a file beside it, and `prompt`."""
    is_told = isinstance(facts, dict) and all(
        isinstance(facts.get(name), str) for name in ("file", "prompt")
    )
    seed = facts.get("seed") if is_told else None
    if not is_told or not (seed is None or type(seed) is int):
        raise OptionError(
            f'{file.name}: expected {{"file": "…", "prompt": "…", "seed": 0}} on each line, '
            f"received {line[:60]!r} on line {number}; correct it (seed may be left out)"
        )
    name = facts["file"]
    if Path(name).name != name or not (file.parent / name).is_file():
        raise OptionError(
            f"{file.name}: expected the name of a file beside it, received {name[:60]!r} on line "
            f"{number}; correct it, or take the line out"
        )
