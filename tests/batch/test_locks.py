"""Locks on manifests: one writer each, and one number of shards in a folder at a time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mmaccel.batch import locks
from mmaccel.batch.manifest import Manifest, manifest_name
from mmaccel.errors import BusyError

Shard = tuple[int, int] | None


@pytest.mark.parametrize(
    ("first", "second", "may"),
    [
        ((1, 2), (2, 2), True),
        ((1, 2), (1, 2), False),
        ((1, 2), (2, 3), False),
        ((1, 3), (1, 2), False),
        (None, (1, 2), False),
        ((1, 2), None, False),
        (None, None, False),
        (None, (1, 1), False),
        ((1, 1), None, False),
        ((1, 12), (1, 2), False),
    ],
)
def test_processes_agree_on_the_number_of_shards(
    tmp_path: Path, first: Shard, second: Shard, may: bool
) -> None:
    """Within one process too: a lock belongs to an opened file."""
    one = Manifest(tmp_path / manifest_name(first))
    if may:
        Manifest(tmp_path / manifest_name(second)).close()
    else:
        with pytest.raises(BusyError, match="expected .* received .*; wait for it"):
            Manifest(tmp_path / manifest_name(second))
    one.append({"still": "writable"})
    one.close()
    Manifest(tmp_path / manifest_name(second)).close()  # ended ones are in nobody's way


def test_who_is_refused_lets_go(tmp_path: Path) -> None:
    """So that the one at work, and its fellow shards, go on undisturbed."""
    one = Manifest(tmp_path / manifest_name((1, 2)))
    for _ in range(2):
        with pytest.raises(BusyError, match=r"manifest\.1-of-2\.jsonl, which another process"):
            Manifest(tmp_path / manifest_name(None))
    Manifest(tmp_path / manifest_name((2, 2))).close()
    one.close()


def test_processes_start_one_after_another(tmp_path: Path) -> None:
    """Who starts looks at the others' manifests, which must not look like work on them."""
    Manifest(tmp_path / manifest_name((1, 2))).close()
    starting = threading.Thread(target=lambda: Manifest(tmp_path / manifest_name((1, 3))).close())
    with locks._starting(tmp_path):
        starting.start()
        starting.join(0.3)
        assert starting.is_alive()
        assert not (tmp_path / manifest_name((1, 3))).read_bytes()
    starting.join(30)
    assert not starting.is_alive()


def test_other_files_count_for_nothing(tmp_path: Path) -> None:
    """A copy that someone keeps open, or a folder, is no shard's manifest."""
    (tmp_path / "manifest.2-of-3.jsonl").mkdir()
    with (tmp_path / "manifest_old.jsonl").open("ab", buffering=0) as kept:
        locks.claim(kept, tmp_path / "manifest_old.jsonl")
        own = Manifest(tmp_path / manifest_name((1, 2)))
        own.append({"is": "written"})
        own.close()
    assert b"written" in own.file.read_bytes()
