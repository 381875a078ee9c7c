"""Locks on manifests: the process that writes a manifest holds its lock.

The lock is filelock's on the open manifest itself, so that there are no lock files and the system
releases the lock however the process ends. File systems without locks lock nothing, nor does
Windows, where a lock would also keep other shards from reading the manifest.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from mmaccel.errors import BusyError

_SHARD = re.compile(r"manifest(?:\.\d+-of-(\d+))?\.jsonl")


def claim(opened: FileIO, file: Path) -> None:
    """Lock an open manifest, and check that processes in its folder agree on the number of shards.

    Processes that start in one folder do so one after the other, because the check locks the
    manifests of the others for a moment.

    Raises:
        BusyError: another process has the manifest open, or a process with another number of
            shards, which would generate the same images, works in this folder.
    """
    with starting(file.parent):
        if not _try_lock(opened.fileno()):
            raise BusyError(
                f"{file}: expected a manifest that no process writes, received one that another "
                "process has open; wait for it, or give each process a --shard or a folder of its "
                "own"
            )
        _check_shards(file)


def _check_shards(file: Path) -> None:
    """Refuse to work next to a process that divides the same images into other shards."""
    own = _n_shards(file) or 1
    for other in sorted(file.parent.glob("manifest*.jsonl")):
        count = _n_shards(other)
        if other.name == file.name or count is None or (count == own and own > 1):
            continue
        if not other.is_file():  # opening a pipe or a device may wait, or do something
            continue
        try:
            with other.open("rb+", buffering=0) as opened:
                is_free = _try_lock(opened.fileno())
        except OSError:  # no write permission
            continue
        if not is_free:
            raise BusyError(
                f"{file}: expected processes that agree on the number of shards, received "
                f"{other.name}, which another process writes: both would make the same images; "
                "wait for it, give all the same n in --shard i/n, or choose another --out"
            )


def _n_shards(file: Path) -> int | None:
    """Number of shards by the name of a manifest; None for other files."""
    found = _SHARD.fullmatch(file.name)
    return None if found is None else int(found[1] or 1)


@contextmanager
def starting(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, on systems that can lock one."""
    try:
        opened = os.open(folder, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        _try_lock(opened, blocking=True)
        yield
    finally:
        os.close(opened)


def _try_lock(opened: int, blocking: bool = False) -> bool:
    """Lock an open file or folder; False if another process holds the lock."""
    from filelock import lock_descriptor

    if sys.platform == "win32":
        return True
    try:
        return lock_descriptor(opened, blocking=blocking)
    except OSError:  # a file system without locks
        return True
