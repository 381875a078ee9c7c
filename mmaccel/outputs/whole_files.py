"""Files written whole or not at all, and never over something that is no file: `write_whole`
renames one of a temporary name in the same folder, whose target is checked first.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmaccel.errors import OptionError


def check_target(file: Path, option: str = "file") -> None:
    """Refuse a name under which no file can be written without harm to something else: none, or
    "-"; a folder, device, pipe or socket, or a link to one; a link that leads out of its folder. A
    link to a file in its own folder is accepted: writing replaces the link.
    """
    target, home = os.path.realpath(file), os.path.realpath(file.parent)
    obstacle = None
    if str(file) == "-":
        obstacle = "but results go into files only"
    elif not file.name or (os.path.exists(target) and not os.path.isfile(target)):
        obstacle = "a folder, device, pipe or socket"
    elif os.path.islink(file) and os.path.commonpath([target, home]) != home:
        obstacle = f"a link out of its folder to {target!r}"
    if obstacle:
        raise OptionError(
            f"{option}: expected a file name, received {str(file)!r}, {obstacle}; "
            "name a file in a folder"
        )


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Write under a temporary name in the same folder, wait for the disk, then rename. If `write`
    raises, no file remains; only a killed process leaves its `.tmp`.
    """
    check_target(file)
    partial = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    partial.unlink(missing_ok=True)  # of a killed process with this number; it may be a link
    try:
        write(partial)
        _sync(partial)
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    _sync(file.parent)


def write_with_facts(file: Path, facts: Mapping[str, Any], write: Callable[[Path], object]) -> None:
    """Write `facts` as JSON under the name of `file` with the suffix `.json`, which stays if
    writing `file` itself then fails.
    """
    text = json.dumps(dict(facts), indent=1) + "\n"
    write_whole(file.with_suffix(".json"), lambda path: path.write_text(text, encoding="utf-8"))
    write_whole(file, write)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk, on systems that support it."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # not every system opens folders
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            raise
    finally:
        os.close(handle)
