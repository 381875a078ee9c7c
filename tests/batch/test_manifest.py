"""The manifest: torn lines, lost files, full disks, and locks that admit one writer."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mmaccel.batch import locks
from mmaccel.batch.job import find_missing, remove_temporaries
from mmaccel.batch.manifest import (
    Manifest,
    WriteError,
    check_fresh,
    is_complete,
    manifest_name,
    read_manifests,
)
from mmaccel.batch.prompts import Row, make_items
from mmaccel.errors import BusyError, OptionError

Shard = tuple[int, int] | None


def record(folder: Path, id: str = "a", k: int = 0, data: bytes = b"pixels") -> dict[str, Any]:
    """A record of a file that is written too."""
    name = f"{id}_{k}.png"
    (folder / name).write_bytes(data)
    return {"id": id, "k": k, "status": "ok", "file": name,
            "sha256": hashlib.sha256(data).hexdigest()}  # fmt: skip


def test_a_folder_with_the_name_of_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "manifest_old.jsonl").mkdir()
    assert read_manifests(tmp_path).records == {}


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "manifest.jsonl"
    one, two = record(tmp_path), record(tmp_path, k=1) | {"prompt": "x\ny\x1b\u2028"}
    for part in (one, two):
        manifest = Manifest(file)
        manifest.append(part)
        manifest.close()
    past = read_manifests(tmp_path)
    assert past.records == {("a", 0): one, ("a", 1): two} and past.torn == []
    assert len(file.read_bytes().splitlines()) == 2 and b"\x1b" not in file.read_bytes()


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "manifest.jsonl"
    whole = json.dumps(record(tmp_path)).encode() + b"\n"
    file.write_bytes(whole + b'{"id": "b", "k": 0, "sta')
    past = read_manifests(tmp_path)
    assert list(past.records) == [("a", 0)] and past.torn == ["manifest.jsonl, line 2"]
    manifest = Manifest(file)
    assert file.read_bytes() == whole
    manifest.append(record(tmp_path, "c"))
    manifest.close()
    assert list(read_manifests(tmp_path).records) == [("a", 0), ("c", 0)]


@pytest.mark.parametrize("line", ["garbage", "[]", '{"id": 1, "k": 0, "status": "ok"}',
                                  '{"id": "b", "k": true, "status": "ok"}', '{"id": "b", "k": 0}',
                                  "\x00" * 40])  # fmt: skip
def test_a_line_without_a_record_is_ignored(tmp_path: Path, line: str) -> None:
    ok = json.dumps(record(tmp_path))
    (tmp_path / "manifest.jsonl").write_text(f"{line}\n{ok}\n")
    past = read_manifests(tmp_path)
    assert list(past.records) == [("a", 0)] and past.torn == ["manifest.jsonl, line 1"]


def test_an_image_is_complete_when_its_file_is(tmp_path: Path) -> None:
    own = record(tmp_path)
    assert is_complete(tmp_path, own)
    (tmp_path / own["file"]).write_bytes(b"pixel")
    assert not is_complete(tmp_path, own)
    (tmp_path / own["file"]).unlink()
    assert not is_complete(tmp_path, own)
    outside = tmp_path / "in"
    outside.mkdir()
    record(tmp_path)
    assert not is_complete(outside, own | {"file": "../a_0.png"})
    assert not is_complete(tmp_path, record(tmp_path) | {"status": "failed"})


def test_success_replaces_a_failure(tmp_path: Path) -> None:
    ok = record(tmp_path)
    failed = {"id": "a", "k": 0, "status": "failed"}
    for lines in ([failed, ok], [ok, failed]):
        (tmp_path / "manifest.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
        assert read_manifests(tmp_path).records[("a", 0)]["status"] == "ok"


def test_shards_have_manifests_of_their_own(tmp_path: Path) -> None:
    names = [manifest_name((i, 2)) for i in (1, 2)]
    assert names == ["manifest.1-of-2.jsonl", "manifest.2-of-2.jsonl"]
    lines = [json.dumps(record(tmp_path, id)).encode() + b"\n" for id in "abc"]
    (tmp_path / names[0]).write_bytes(lines[2] + lines[0])
    (tmp_path / names[1]).write_bytes(lines[1])
    assert sorted(read_manifests(tmp_path).records) == [("a", 0), ("b", 0), ("c", 0)]


@pytest.mark.slow
def test_no_other_process_writes_an_open_manifest(tmp_path: Path) -> None:
    file = tmp_path / "manifest.jsonl"
    manifest = Manifest(file)
    code = (
        "import sys; from pathlib import Path; from mmaccel.batch.manifest import Manifest\n"
        "from mmaccel.errors import BusyError\n"
        "try: Manifest(Path(sys.argv[1]))\nexcept BusyError: sys.exit(7)"
    )
    other = [sys.executable, "-c", code, str(file)]
    assert subprocess.run(other).returncode == 7
    with pytest.raises(BusyError):
        Manifest(file)
    manifest.close()
    assert subprocess.run(other).returncode == 0


def test_a_full_disk_leaves_no_part_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "manifest.jsonl"
    manifest = Manifest(file)
    manifest.append(record(tmp_path))
    before = file.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        manifest.append(record(tmp_path, "b"))
    monkeypatch.undo()
    assert file.read_bytes() == before
    manifest.append(record(tmp_path, "c"))
    assert list(read_manifests(tmp_path).records) == [("a", 0), ("c", 0)]


def test_a_folder_with_a_manifest_is_refused_unless_resumed(tmp_path: Path) -> None:
    file = tmp_path / "manifest.jsonl"
    check_fresh(file)
    file.write_bytes(b"")
    check_fresh(file)
    file.write_bytes(b"x")
    with pytest.raises(OptionError, match="--resume"):
        check_fresh(file)


def test_missing_items(tmp_path: Path) -> None:
    items = make_items([Row("a", "x", n=4, line=3)], 0)
    fingerprints = {item.key: "r" for item in items}
    lines = []
    for item in items[:3]:
        (tmp_path / item.file).write_bytes(b"p")
        sha = hashlib.sha256(b"p").hexdigest()
        lines.append({"id": "a", "k": item.k, "status": "ok", "file": item.file, "sha256": sha,
                      "fingerprint": "r"})  # fmt: skip
    lines[1]["sha256"] = "0" * 64
    lines[2]["status"] = "failed"
    (tmp_path / "manifest.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    past = read_manifests(tmp_path)
    assert find_missing(items, fingerprints, past, tmp_path) == items[1:]
    with pytest.raises(OptionError, match="others for 2 items .the first is a, line 3"):
        find_missing(items, dict.fromkeys(fingerprints, "s"), past, tmp_path)


def test_only_own_temporary_files_are_removed(tmp_path: Path) -> None:
    items = make_items([Row("a", "x")], 0)
    own = tmp_path / f".{items[0].file}.123.tmp"
    others = [tmp_path / ".b_0_1.png.123.tmp", tmp_path / ".notes.tmp", tmp_path / items[0].file]
    for file in (own, *others):
        file.write_bytes(b"")
    remove_temporaries(tmp_path, items)
    assert not own.exists() and all(file.exists() for file in others)


def test_a_record_that_names_another_file_does_not_count(tmp_path: Path) -> None:
    items = make_items([Row("a", "x", n=2)], 0)
    fingerprints = {item.key: "r" for item in items}
    (tmp_path / items[1].file).write_bytes(b"p")
    line = {"id": "a", "k": 0, "status": "ok", "file": items[1].file, "fingerprint": "r",
            "sha256": hashlib.sha256(b"p").hexdigest()}  # fmt: skip
    (tmp_path / "manifest.jsonl").write_text(json.dumps(line) + "\n")
    assert find_missing(items, fingerprints, read_manifests(tmp_path), tmp_path) == items


def test_a_link_instead_of_a_manifest_is_refused(tmp_path: Path) -> None:
    target, link = tmp_path / "precious.txt", tmp_path / "manifest.jsonl"
    target.write_bytes(b"no end of a line")
    link.symlink_to(target)
    with pytest.raises(OptionError, match="a link"):
        Manifest(link)
    assert target.read_bytes() == b"no end of a line"


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
    Manifest(tmp_path / manifest_name(second)).close()  # after the other process ended


def test_a_refused_process_releases_its_locks(tmp_path: Path) -> None:
    """So that the running process and its other shards continue."""
    one = Manifest(tmp_path / manifest_name((1, 2)))
    for _ in range(2):
        with pytest.raises(BusyError, match=r"manifest\.1-of-2\.jsonl, which another process"):
            Manifest(tmp_path / manifest_name(None))
    Manifest(tmp_path / manifest_name((2, 2))).close()
    one.close()


def test_processes_start_one_after_another(tmp_path: Path) -> None:
    """A starting process locks the manifests of the others, which must not refuse a third."""
    Manifest(tmp_path / manifest_name((1, 2))).close()
    starting = threading.Thread(target=lambda: Manifest(tmp_path / manifest_name((1, 3))).close())
    with locks._starting(tmp_path):
        starting.start()
        starting.join(0.3)
        assert starting.is_alive()
        assert not (tmp_path / manifest_name((1, 3))).read_bytes()
    starting.join(30)
    assert not starting.is_alive()


def test_other_files_are_ignored(tmp_path: Path) -> None:
    """An open copy of a manifest, or a folder, is not the manifest of a shard."""
    (tmp_path / "manifest.2-of-3.jsonl").mkdir()
    with (tmp_path / "manifest_old.jsonl").open("ab", buffering=0) as copy:
        locks.claim(copy, tmp_path / "manifest_old.jsonl")
        own = Manifest(tmp_path / manifest_name((1, 2)))
        own.append({"is": "written"})
        own.close()
    assert b"written" in own.file.read_bytes()


def test_a_manifest_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="expected a manifest that can be written, received: No s"):
        Manifest(tmp_path / "none" / "manifest.jsonl")
