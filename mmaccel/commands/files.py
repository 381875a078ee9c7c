"""Folders and files that commands write: checked before any work, written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmaccel.checks import show
from mmaccel.errors import OptionError
from mmaccel.outputs.machine import describe_machine
from mmaccel.outputs.whole_files import check_target, write_whole

_MAX_NAME = 255  # bytes; the limit of file systems


def check_folder(folder: Path, option: str = "--out") -> None:
    """Refuse a folder that cannot be created or written, without creating it."""
    if any(len(os.fsencode(name)) > _MAX_NAME for name in folder.parts):
        raise OptionError(
            f"{option}: expected a name that this system takes, received {show(str(folder))} "
            f"({os.strerror(errno.ENAMETOOLONG)}); shorten it"
        )
    nearest = folder
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        reason = os.strerror(errno.EACCES if nearest.is_dir() else errno.ENOTDIR)
        raise OSError(
            f"{option}: expected a folder that can be written, received {show(str(folder))} "
            f"({reason}); choose another"
        )


def open_folder(folder: Path, option: str = "--out") -> None:
    check_folder(folder, option)
    folder.mkdir(parents=True, exist_ok=True)


def check_file(option: str, file: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is measured; None is accepted."""
    if file is not None:
        check_target(file, option)
        open_folder(file.parent, option)


def first_of(names: Sequence[str], most: int = 3) -> str:
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def new_report(device: str = "cpu", *, program: str = "mmaccel", **facts: Any) -> dict[str, Any]:
    """A report that begins with the command line, of `program`, and the machine with versions."""
    command = shlex.join([*program.split(), *sys.argv[1:]])
    return {"command": command, "machine": describe_machine(device), **facts}


def write_file(file: Path, write: Callable[[Path], object]) -> None:
    try:
        write_whole(file, write)
    except OSError as error:
        raise OSError(
            f"{file}: expected space and permission to write this file, received: "
            f"{error.strerror or error}; free some space, or choose another folder"
        ) from error


def write_text(file: Path, text: str) -> None:
    write_file(file, lambda path: path.write_text(text, encoding="utf-8"))


def write_json(file: Path | None, report: Mapping[str, Any]) -> None:
    if file is not None:
        write_text(file, to_json(report) + "\n")


def to_json(value: Any, depth: int = 0) -> str:
    """JSON whose objects and lists of objects have a line for each part, and other lists one."""
    is_split = isinstance(value, list) and any(isinstance(part, dict) for part in value)
    if not value or not (is_split or isinstance(value, dict)):
        return json.dumps(value, allow_nan=False)
    parts = [to_json(part, depth + 1) for part in (value if is_split else value.values())]
    if not is_split:
        parts = [f"{json.dumps(str(key))}: {part}" for key, part in zip(value, parts)]
    first, last = "[]" if is_split else "{}"
    line = "\n" + " " * (depth + 1)
    return f"{first}{line}{(',' + line).join(parts)}\n{' ' * depth}{last}"


def write_lines(file: Path | None, lines: Sequence[Mapping[str, Any]]) -> None:
    if file is not None:
        write_text(file, "".join(json.dumps(dict(line), allow_nan=False) + "\n" for line in lines))
