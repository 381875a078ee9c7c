"""The manifest: torn lines, lost files, full disks, and locks that admit one writer.

What is refused, and how: tests/messages/batch.py.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from mmaccel.batch import locks
from mmaccel.batch.job import find_lost, find_missing, remove_temporaries
from mmaccel.batch.manifest import (
    Manifest,
    check_fresh,
    is_complete,
    manifest_name,
    read_manifests,
    to_line,
)
from mmaccel.batch.prompts import Row, make_items
from mmaccel.errors import BusyError, OptionError

Shard = tuple[int, int] | None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The manifest of a folder, which is not there yet."""
    return tmp_path / "manifest.jsonl"


def record(folder: Path, id: str = "a", k: int = 0, file: str | None = None) -> dict[str, Any]:
    """A record of a file that is written too."""
    name = f"{id}_{k}.png" if file is None else file
    (folder / name).write_bytes(b"pixels")
    sha = hashlib.sha256(b"pixels").hexdigest()
    return {"id": id, "k": k, "status": "ok", "file": name, "sha256": sha, "fingerprint": "r"}


def write(file: Path, records: Iterable[dict[str, Any]]) -> None:
    file.write_bytes(b"".join(map(to_line, records)))


def keys(folder: Path) -> list[tuple[str, int]]:
    return list(read_manifests(folder).records)


def test_what_is_appended_is_read_back(tmp_path: Path, file: Path) -> None:
    (tmp_path / "manifest_old.jsonl").mkdir()  # a folder of such a name is no manifest
    one, two = record(tmp_path), record(tmp_path, k=1) | {"prompt": "x\ny\x1b\u2028"}
    for part in (one, two):
        manifest = Manifest(file)
        manifest.append(part)
        manifest.close()
    past = read_manifests(tmp_path)
    assert past.records == {("a", 0): one, ("a", 1): two} and past.torn == []
    assert len(file.read_bytes().splitlines()) == 2 and b"\x1b" not in file.read_bytes()


def test_a_torn_last_line_is_cut_off(tmp_path: Path, file: Path) -> None:
    whole = to_line(record(tmp_path))
    file.write_bytes(whole + b'{"id": "b", "k": 0, "sta')
    past = read_manifests(tmp_path)
    assert list(past.records) == [("a", 0)] and past.torn == ["manifest.jsonl, line 2"]
    manifest = Manifest(file)
    assert file.read_bytes() == whole
    manifest.append(record(tmp_path, "c"))
    manifest.close()
    assert keys(tmp_path) == [("a", 0), ("c", 0)]


def test_lines_without_a_record_are_ignored(tmp_path: Path, file: Path) -> None:
    bad = ["garbage", "[]", '{"id": 1, "k": 0, "status": "ok"}', "\x00" * 40]
    bad += ['{"id": "b", "k": true, "status": "ok"}', '{"id": "b", "k": 0}']
    fields = ("file", "bytes", "sha256", "fingerprint", "seed", "job_seed")
    bad += [f'{{"id": "b", "k": 0, "status": "ok", "{name}": null}}' for name in fields]
    file.write_bytes("\n".join(bad).encode() + b"\n" + to_line(record(tmp_path)))
    assert keys(tmp_path) == [("a", 0)]
    torn = [f"manifest.jsonl, line {number}" for number in range(1, len(bad) + 1)]
    assert read_manifests(tmp_path).torn == torn


def test_success_replaces_a_failure(tmp_path: Path, file: Path) -> None:
    ok = record(tmp_path)
    failed = ok | {"status": "failed"}
    for lines in ([failed, ok], [ok, failed]):
        write(file, lines)
        assert read_manifests(tmp_path).records["a", 0]["status"] == "ok"


def test_shards_have_manifests_of_their_own(tmp_path: Path) -> None:
    names = [manifest_name((i, 2)) for i in (1, 2)]
    assert names == ["manifest.1-of-2.jsonl", "manifest.2-of-2.jsonl"]
    for name, ids in zip(names, ("ca", "b")):
        write(tmp_path / name, [record(tmp_path, id) for id in ids])
    assert sorted(keys(tmp_path)) == [("a", 0), ("b", 0), ("c", 0)]


@pytest.mark.slow
def test_no_other_process_writes_an_open_manifest(file: Path) -> None:
    manifest = Manifest(file)
    code = (
        "import sys; from pathlib import Path; from mmaccel.batch.manifest import Manifest\n"
        "from mmaccel.errors import BusyError\n"
        "try: Manifest(Path(sys.argv[1]))\nexcept BusyError: sys.exit(7)"
    )
    other = [sys.executable, "-c", code, str(file)]
    assert subprocess.run(other).returncode == 7
    manifest.close()
    assert subprocess.run(other).returncode == 0


def test_a_full_disk_leaves_no_part_of_a_line(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Manifest(file)
    manifest.append(record(tmp_path))
    before = file.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "fsync", full)
        manifest.append(record(tmp_path, "b"))
    assert file.read_bytes() == before
    manifest.append(record(tmp_path, "c"))
    manifest.close()
    assert keys(tmp_path) == [("a", 0), ("c", 0)]


def test_an_empty_manifest_is_fresh_and_a_link_is_not_written(tmp_path: Path, file: Path) -> None:
    check_fresh(file)
    file.write_bytes(b"")
    check_fresh(file)
    link = tmp_path / "manifest.1-of-2.jsonl"
    link.symlink_to(tmp_path / "precious.txt")
    link.write_bytes(b"no end of a line")
    with pytest.raises(OptionError):
        Manifest(link)
    assert link.read_bytes() == b"no end of a line"


LOSSES: dict[str, dict[str, Any]] = {
    "another checksum": {"sha256": "0" * 64},
    "no checksum": {"sha256": ""},
    "another size": {"bytes": 7},
    "it failed": {"status": "failed"},
    "another item's file": {"file": "other.png"},
    "no file": {"file": "none.png"},
    "a file outside": {"file": "../outside.png"},
}


def test_missing_items(tmp_path: Path, file: Path) -> None:
    """An item is complete when its own file is in the folder and has the checksum of its record."""
    items = make_items([Row("a", "x", n=2 + len(LOSSES), line=3)], 0)
    lines = [record(tmp_path, k=item.k, file=item.file) for item in items[:-1]]
    for name in ("other.png", "../outside.png"):
        (tmp_path / name).write_bytes(b"pixels")
    for line, loss in zip(lines[1:], LOSSES.values(), strict=True):
        line |= loss
    write(file, lines)
    past = read_manifests(tmp_path)
    assert find_missing(items, lambda item: "r", past, tmp_path) == items[1:]
    assert past.lines["a", 1] == "manifest.jsonl, line 2"
    assert [is_complete(tmp_path, line) for line in lines] == [
        True,
        *[False] * 4,
        True,
        False,
        False,
    ]
    with pytest.raises(OptionError, match="others for 7 items .the first is a, line 3"):
        find_missing(items, lambda item: "s", past, tmp_path)


def test_a_sound_without_the_json_file_beside_it_is_missing(tmp_path: Path, file: Path) -> None:
    (item,) = make_items([Row("a", "x")], 0, ".wav")
    write(file, [record(tmp_path, file=item.file)])
    past = read_manifests(tmp_path)
    for lost in ([item], []):
        assert find_missing([item], lambda item: "r", past, tmp_path) == lost
        assert find_lost([item], lambda item: "r", tmp_path).files == [i.file for i in lost]
        (tmp_path / item.file).with_suffix(".json").touch()


def test_the_manifest_written_last_counts(tmp_path: Path, file: Path) -> None:
    write(file, [record(tmp_path) | {"bytes": 9}])
    write(tmp_path / manifest_name((1, 2)), [record(tmp_path)])
    os.utime(file, (1, 1))
    assert "bytes" not in read_manifests(tmp_path).records["a", 0]


def test_only_own_temporary_files_are_removed(tmp_path: Path) -> None:
    items = make_items([Row("a", "x")], 0, ".mp4")
    sidecar = Path(items[0].file).with_suffix(".json").name  # of a clip
    own = [tmp_path / f".{name}.123.tmp" for name in (items[0].file, sidecar)]
    others = [tmp_path / ".b_0_1.png.123.tmp", tmp_path / ".notes.tmp", tmp_path / items[0].file]
    for file in (*own, *others):
        file.write_bytes(b"")
    remove_temporaries(tmp_path, items)
    assert not any(file.exists() for file in own) and all(file.exists() for file in others)


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
    """Within one process too: a lock belongs to an opened file. A refused process releases its
    locks, so that the one that runs, and its other shards, continue.
    """
    one, other = (tmp_path / manifest_name(shard) for shard in (first, second))
    running = Manifest(one)
    for _ in range(2):
        if may:
            Manifest(other).close()
        else:
            with pytest.raises(BusyError):
                Manifest(other)
    running.append({"still": "writable"})
    running.close()
    Manifest(other).close()  # after the other process ended


def test_processes_start_one_after_another(tmp_path: Path) -> None:
    """A starting process locks the manifests of the others, which must not refuse a third."""
    Manifest(tmp_path / manifest_name((1, 2))).close()
    starting = threading.Thread(target=lambda: Manifest(tmp_path / manifest_name((1, 3))).close())
    with locks.starting(tmp_path):
        starting.start()
        starting.join(0.1)
        assert starting.is_alive()
        assert not (tmp_path / manifest_name((1, 3))).read_bytes()
    starting.join(30)
    assert not starting.is_alive()


def test_other_files_are_ignored(tmp_path: Path) -> None:
    """An open copy of a manifest, or a folder, is not the manifest of a shard."""
    (tmp_path / "manifest.2-of-3.jsonl").mkdir()
    copy, own = (
        Manifest(tmp_path / name) for name in ("manifest_old.jsonl", manifest_name((1, 2)))
    )
    own.append({"is": "written"})
    own.close()
    copy.close()
    assert b"written" in own.file.read_bytes()
