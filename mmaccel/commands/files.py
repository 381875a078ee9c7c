"""Folders and files that commands write: checked before any work, written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmaccel.checks import show
from mmaccel.commands.process import Incomplete
from mmaccel.outputs.machine import describe_machine
from mmaccel.outputs.whole_files import check_target, write_whole


def check_folder(folder: Path, option: str = "--out") -> None:
    """Refuse a folder that cannot be created or written, without creating it.

    Raises:
        OSError: with the name of the option; as the system has it where a name is too long.
    """
    found = folder
    while not os.path.lexists(found) and found != found.parent:
        found = found.parent
    for path in (folder, found / folder.name):  # too long as a whole, or its last name
        try:
            os.lstat(path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise
    if not found.is_dir():
        raise _not_writable(folder, option, os.strerror(errno.ENOTDIR))
    if not os.access(found, os.W_OK | os.X_OK):
        raise _not_writable(folder, option, os.strerror(errno.EACCES))


def open_folder(folder: Path, option: str = "--out") -> None:
    """Create a folder, and write a temporary file to make sure that this is possible.

    Raises:
        OSError: with the name of the option; as the system has it where a name is too long.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise
        raise _not_writable(folder, option, error.strerror) from error


def _not_writable(folder: Path, option: str, reason: str | None) -> OSError:
    return OSError(
        f"{option}: expected a folder that can be written, received {show(str(folder))} "
        f"({reason}); choose another"
    )


def check_file(option: str, file: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is measured; None is accepted.

    Raises:
        OptionError: see `mmaccel.outputs.whole_files.check_target`.
        OSError: its folder cannot be written.
    """
    if file is not None:
        check_target(file, option)
        open_folder(file.parent, option)


def check_written(files: Sequence[Path], folder: Path) -> None:
    """Look for written files before a command says that it is done.

    Raises:
        Incomplete: with the names of the first that are gone.
    """
    gone = [file.name for file in files if not file.is_file()]
    if gone:
        raise Incomplete(
            f"--out: expected the {len(files)} written files in {str(folder)!r}, received a folder "
            f"without {len(gone)} of them ({first_of(gone)}), which something else removed; "
            "run it again"
        )


def not_written(name: str, folder: Path, state: str, error: OSError) -> OSError:
    """The error of a run that cannot write a file.

    Args:
        name: of the file.
        folder: of the run.
        state: how many files are written, such as "3 of 8 images are".
        error: of the system.
    """
    return OSError(
        f"--out: expected space for {name} in {str(folder)!r}, received {error.strerror or error}; "
        f"{state} written; free some space, and run it again"
    )


def first_of(names: Sequence[str], most: int = 3) -> str:
    """The first names of a list, with commas."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def new_report(device: str = "cpu", *, program: str = "mmaccel", **facts: Any) -> dict[str, Any]:
    """A report that begins with the command line, of `program`, and the machine with versions."""
    command = shlex.join([*program.split(), *sys.argv[1:]])
    return {"command": command, "machine": describe_machine(device), **facts}


def write_text(file: Path, text: str) -> None:
    """Write a text file.

    Raises:
        OptionError: see `mmaccel.outputs.whole_files.check_target`.
        OSError: it cannot be written.
    """
    try:
        write_whole(file, lambda path: path.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise OSError(
            f"{file}: expected space and permission to write this file, received: "
            f"{error.strerror or error}; free some space, or choose another folder"
        ) from error


def write_json(file: Path | None, report: Mapping[str, Any]) -> None:
    """Write a report as JSON, if a file is given."""
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
    """Write one JSON object a line, if a file is given."""
    if file is not None:
        write_text(file, "".join(json.dumps(dict(line), allow_nan=False) + "\n" for line in lines))
