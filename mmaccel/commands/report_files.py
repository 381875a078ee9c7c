"""What `bench` and the `evaluate` commands write: reports and lines, whole or not at all."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmaccel.commands.run_setup import check_file_name, open_folder
from mmaccel.outputs.image_files import write_whole
from mmaccel.outputs.machine import describe_machine


def new_report(device: str = "cpu", **facts: Any) -> dict[str, Any]:
    """The head of a report: the command and the machine, then `facts`."""
    command = shlex.join(["mmaccel", *sys.argv[1:]])
    return {"command": command, "machine": describe_machine(device), **facts}


def check_file(option: str, file: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is measured; None is fine.

    Raises:
        OptionError: see `check_file_name`.
        OSError: its folder cannot be written.
    """
    check_file_name(option, file)
    if file is not None:
        open_folder(file.parent, option)


def write_text(file: Path, text: str) -> None:
    """Write a text, whole or not at all."""
    write_whole(file, lambda path: path.write_text(text, encoding="utf-8"))


def write_json(file: Path | None, report: Mapping[str, Any]) -> None:
    """Write a report; nothing where no file is wanted."""
    if file is not None:
        write_text(file, json.dumps(report, indent=1, allow_nan=False) + "\n")


def write_lines(file: Path | None, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write an object a line; nothing where no file is wanted."""
    if file is not None:
        write_text(file, "".join(json.dumps(dict(line), allow_nan=False) + "\n" for line in lines))
