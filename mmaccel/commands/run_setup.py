"""What commands make of their options before anything is generated."""

from __future__ import annotations

import errno
import os
import tempfile
from ast import literal_eval
from pathlib import Path
from typing import Any

from mmaccel.errors import OptionError


def parse_window(text: str | None) -> int | str | None:
    """The value of `--window`: an integer, or the text itself for the policy to judge."""
    try:
        return None if text is None else int(text)
    except ValueError:
        return text


def parse_fields(texts: list[str]) -> dict[str, Any]:
    """The values of `--set name=value`: Python literals, or texts.

    Raises:
        OptionError: no name, no value, or a name twice.
    """
    fields: dict[str, Any] = {}
    for text in texts:
        name, is_given, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not is_given or not name.isidentifier() or name in fields:
            raise OptionError(
                f"--set: expected name=value, each name once, received {text!r}; "
                "write for example --set gamma=0.2"
            )
        try:
            fields[name] = literal_eval(value.strip())
        except (ValueError, SyntaxError):
            fields[name] = value.strip()
    return fields


def merge_fields(named: dict[str, Any], texts: list[str] | None) -> dict[str, Any]:
    """Fields of a policy by options of their own and by `--set`.

    Raises:
        OptionError: see `parse_fields`; one by both.
    """
    fields = parse_fields(texts or [])
    for name in fields.keys() & named.keys():
        option = name.replace("_", "-")
        raise OptionError(
            f"--{option}: expected it once, received {named[name]!r} and --set {name}="
            f"{fields[name]!r}; leave one of them out"
        )
    return named | fields


def given(**options: Any) -> dict[str, Any]:
    """The options that were given on the command line."""
    return {name: value for name, value in options.items() if value is not None}


def check_count(name: str, value: int) -> None:
    """Refuse a number below 1.

    Raises:
        OptionError: with the option's name.
    """
    if value < 1:
        raise OptionError(f"--{name}: expected at least 1, received {value}; ask for 1 or more")


def check_folder(folder: Path, option: str = "--out") -> None:
    """Refuse a folder that cannot be made, or written, before anything is made or loaded.

    Raises:
        OSError: as `open_folder`.
    """
    found = folder
    while not os.path.lexists(found) and found != found.parent:
        found = found.parent
    if not found.is_dir():
        raise _unfit(folder, option, os.strerror(errno.ENOTDIR))
    if not os.access(found, os.W_OK | os.X_OK):
        raise _unfit(folder, option, os.strerror(errno.EACCES))


def _unfit(folder: Path, option: str, reason: str | None) -> OSError:
    return OSError(
        f"{option}: expected a folder that can be written, received {str(folder)!r} ({reason}); "
        "choose another"
    )


def open_folder(folder: Path, option: str = "--out") -> None:
    """Make a folder for results and make sure that it can be written; `option` named it.

    Raises:
        OSError: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unfit(folder, option, error.strerror) from error


def check_file_name(option: str, file: Path | None) -> None:
    """Refuse what no file can be written under; None is fine.

    Raises:
        OptionError: a folder, a device, no name, or "-", as results go into files alone.
    """
    if file is None:
        return
    if not file.name or str(file) == "-" or (file.exists() and not file.is_file()):
        raise OptionError(
            f"{option}: expected a file name, received {str(file)!r}; name a file in a folder"
        )
