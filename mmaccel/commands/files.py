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

from mmaccel.errors import OptionError
from mmaccel.outputs.image_files import write_whole
from mmaccel.outputs.machine import describe_machine


def check_folder(folder: Path, option: str = "--out") -> None:
    """Refuse a folder that cannot be created or written, without creating it.

    Raises:
        OSError: with the name of the option.
    """
    found = folder
    while not os.path.lexists(found) and found != found.parent:
        found = found.parent
    if not found.is_dir():
        raise _not_writable(folder, option, os.strerror(errno.ENOTDIR))
    if not os.access(found, os.W_OK | os.X_OK):
        raise _not_writable(folder, option, os.strerror(errno.EACCES))


def open_folder(folder: Path, option: str = "--out") -> None:
    """Create a folder, and write a temporary file to make sure that this is possible.

    Raises:
        OSError: with the name of the option.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_writable(folder, option, error.strerror) from error


def _not_writable(folder: Path, option: str, reason: str | None) -> OSError:
    return OSError(
        f"{option}: expected a folder that can be written, received {str(folder)!r} ({reason}); "
        "choose another"
    )


def check_file_name(option: str, file: Path | None) -> None:
    """Refuse a path that no file can have; None is accepted.

    Raises:
        OptionError: a folder, a device, no name, or "-", because results go into files only.
    """
    if file is None:
        return
    if not file.name or str(file) == "-" or (file.exists() and not file.is_file()):
        raise OptionError(
            f"{option}: expected a file name, received {str(file)!r}; name a file in a folder"
        )


def check_file(option: str, file: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is measured; None is accepted.

    Raises:
        OptionError: see `check_file_name`.
        OSError: its folder cannot be written.
    """
    check_file_name(option, file)
    if file is not None:
        open_folder(file.parent, option)


def new_report(device: str = "cpu", **facts: Any) -> dict[str, Any]:
    """A report that begins with the command line and the machine."""
    command = shlex.join(["mmaccel", *sys.argv[1:]])
    return {"command": command, "machine": describe_machine(device), **facts}


def write_text(file: Path, text: str) -> None:
    """Write a text file."""
    write_whole(file, lambda path: path.write_text(text, encoding="utf-8"))


def write_json(file: Path | None, report: Mapping[str, Any]) -> None:
    """Write a report as JSON, if a file is given."""
    if file is not None:
        write_text(file, json.dumps(report, indent=1, allow_nan=False) + "\n")


def write_lines(file: Path | None, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write one JSON object a line, if a file is given."""
    if file is not None:
        write_text(file, "".join(json.dumps(dict(line), allow_nan=False) + "\n" for line in lines))
