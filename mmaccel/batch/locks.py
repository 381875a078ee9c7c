"""Locks on manifests: who writes one keeps it locked, and the system lets go of it at any end.

Nothing is locked on systems without `fcntl` and on file systems without locks.
"""

from __future__ import annotations

import re
from io import FileIO
from pathlib import Path

from mmaccel.errors import BusyError

_SHARD = re.compile(r"manifest(?:\.\d+-of-(\d+))?\.jsonl")


def lock(opened: FileIO, file: Path) -> None:
    """Keep others from writing an open manifest.

    Raises:
        BusyError: another process has it open.
    """
    if not _try(opened, shared=False):
        raise BusyError(
            f"{file}: expected a manifest that nobody writes, received one that another process "
            "has open; wait for it, or give each process a --shard or a folder of its own"
        )


def check_counts(file: Path) -> None:
    """Refuse to work beside shards that deal the same pictures otherwise, or all of them too.

    Args:
        file: the manifest of this process, locked already, so that of two which start together at
            least one sees the other.

    Raises:
        BusyError: a process of another number of shards is at work in this folder.
    """
    own = _count(file) or 1
    for other in sorted(file.parent.glob("manifest*.jsonl")):
        count = _count(other)
        if other.name == file.name or count is None or (count == own and own > 1):
            continue
        try:
            with other.open("rb", buffering=0) as opened:
                is_free = _try(opened, shared=True)
        except OSError:  # not to be read, as a folder is not
            continue
        if not is_free:
            raise BusyError(
                f"{file}: expected processes that agree on the number of shards, received "
                f"{other.name}, which another one is writing: both would make the same pictures; "
                "wait for it, give all the same n in --shard i/n, or choose another --out"
            )


def _count(file: Path) -> int | None:
    """Shards of the job that a manifest belongs to; None where the name is none of ours."""
    found = _SHARD.fullmatch(file.name)
    return None if found is None else int(found[1] or 1)


def _try(opened: FileIO, *, shared: bool) -> bool:
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return True
    try:
        fcntl.flock(opened.fileno(), (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True
