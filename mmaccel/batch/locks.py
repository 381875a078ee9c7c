"""Locks on manifests: who writes one keeps it locked, and the system releases it at any end.

The lock is filelock's on the open manifest itself, so that no further files lie in the folder and
none is left by a process that is killed. Nothing is locked on file systems without locks, nor on
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
    """Keep others from writing an open manifest, and keep away from a job that deals otherwise.

    Processes that start in one folder do so one after the other, so that none takes another's short
    look for work on a manifest.

    Raises:
        BusyError: another process has it open, or a process of another number of shards, which
            would make the same images, is at work in this folder.
    """
    with _one_start_at_a_time(file.parent):
        if not _try(opened.fileno()):
            raise BusyError(
                f"{file}: expected a manifest that nobody writes, received one that another "
                "process has open; wait for it, or give each process a --shard or a folder of its "
                "own"
            )
        _check_counts(file)


def _check_counts(file: Path) -> None:
    """Refuse to work next to shards that deal the same images otherwise, or all of them too."""
    own = _count(file) or 1
    for other in sorted(file.parent.glob("manifest*.jsonl")):
        count = _count(other)
        if other.name == file.name or count is None or (count == own and own > 1):
            continue
        try:
            with other.open("rb+", buffering=0) as opened:
                is_free = _try(opened.fileno())
        except OSError:  # not to be written, as a folder is not
            continue
        if not is_free:
            raise BusyError(
                f"{file}: expected processes that agree on the number of shards, received "
                f"{other.name}, which another one is writing: both would make the same images; "
                "wait for it, give all the same n in --shard i/n, or choose another --out"
            )


def _count(file: Path) -> int | None:
    """Shards of the job that a manifest belongs to; None where the name is none of ours."""
    found = _SHARD.fullmatch(file.name)
    return None if found is None else int(found[1] or 1)


@contextmanager
def _one_start_at_a_time(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, where folders can be opened and locked."""
    try:
        opened = os.open(folder, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        _try(opened, blocking=True)
        yield
    finally:
        os.close(opened)


def _try(opened: int, blocking: bool = False) -> bool:
    """Lock an open file or folder; False if another has it locked."""
    from filelock import lock_descriptor

    if sys.platform == "win32":
        return True
    try:
        return lock_descriptor(opened, blocking=blocking)
    except OSError:  # a file system without locks
        return True
