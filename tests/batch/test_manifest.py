"""The manifest: torn lines, lost files, and locks that admit one writer.

What is refused, and how: tests/messages/test_commands.py.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmaccel.batch.job import find_missing, remove_temporaries
from mmaccel.batch.manifest import Manifest, check_fresh, manifest_name, read_manifests, to_line
from mmaccel.batch.prompts import Row, make_items
from mmaccel.errors import BusyError, OptionError
from tests.fixtures.jobs import raise_full


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The manifest of a folder, which is not there yet."""
    return tmp_path / "manifest.jsonl"


def record(folder: Path, id: str = "a", k: int = 0, file: str = "a_0.png") -> dict[str, Any]:
    """A record of a file that is written too."""
    (folder / file).write_bytes(b"pixels")
    sha = hashlib.sha256(b"pixels").hexdigest()
    return {"id": id, "k": k, "status": "ok", "file": file, "sha256": sha, "fingerprint": "r"}


def write(file: Path, *records: dict[str, Any]) -> None:
    file.write_bytes(b"".join(map(to_line, records)))


def test_what_is_appended_is_read_back_and_a_torn_line_is_cut_off(file: Path) -> None:
    (file.parent / "manifest_old.jsonl").mkdir()  # a folder of such a name is no manifest
    file.write_bytes(b"")
    check_fresh(file)
    one, two = record(file.parent), record(file.parent, k=1) | {"prompt": "x\ny\x1b\u2028"}
    for part in (one, two):
        manifest = Manifest(file)
        manifest.append(part)
        manifest.close()
        with file.open("ab") as opened:
            opened.write(b'{"id": "b", "k": 0, "sta')
    past = read_manifests(file.parent)
    assert past.records == {("a", 0): one, ("a", 1): two}
    assert past.torn == ["manifest.jsonl, line 3"] and b"\x1b" not in file.read_bytes()
    Manifest(file).close()
    assert file.read_bytes() == to_line(one) + to_line(two)


def test_lines_without_a_record_are_ignored(file: Path) -> None:
    bad = ["garbage", "[]", '{"id": 1, "k": 0, "status": "ok"}', "\x00" * 40, "[" * 50_000]
    bad += ['{"id": "b", "k": true, "status": "ok"}', '{"id": "b", "k": 0}']
    file.write_bytes("\n".join(bad).encode() + b"\n" + to_line(record(file.parent)))
    past = read_manifests(file.parent)
    torn = [f"manifest.jsonl, line {number}" for number in range(1, len(bad) + 1)]
    assert list(past.records) == [("a", 0)] and past.torn == torn


def test_success_and_the_manifest_written_last_count(file: Path) -> None:
    ok = record(file.parent)
    for some in ([ok | {"status": "failed"}, ok], [ok, ok | {"status": "failed"}]):
        write(file, *some)
        assert read_manifests(file.parent).records["a", 0]["status"] == "ok"
    write(file, ok | {"bytes": 9})
    write(file.parent / manifest_name((1, 2)), ok, ok | {"id": "b"})
    os.utime(file, (1, 1))
    found = read_manifests(file.parent).records
    assert set(found) == {("a", 0), ("b", 0)} and "bytes" not in found["a", 0]


def test_a_full_disk_leaves_no_part_of_a_line(file: Path, monkeypatch: Any) -> None:
    manifest, line = Manifest(file), record(file.parent)
    manifest.append(line)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "fsync", lambda _: raise_full())
        manifest.append(line | {"id": "b"})
    manifest.append(line | {"id": "c"})
    manifest.close()
    assert file.read_bytes() == to_line(line) + to_line(line | {"id": "c"})


LOSSES: tuple[dict[str, Any], ...] = (
    {"sha256": "0" * 64},
    {"bytes": 7},
    {"status": "failed"},
    {"file": "other.png"},  # of another item, and complete
    {"file": "none.png"},
    {"file": "../outside.png"},
)


def test_missing_items(tmp_path: Path, file: Path) -> None:
    """An item is complete when its own file is in the folder and has the checksum of its record."""
    items = make_items([Row("a", "x", n=2 + len(LOSSES), line=3)], 0)
    noted = [record(tmp_path, k=item.k, file=item.file) for item in items[:-1]]
    for name in ("other.png", "../outside.png"):
        (tmp_path / name).write_bytes(b"pixels")
    write(file, noted[0], *(line | loss for line, loss in zip(noted[1:], LOSSES, strict=True)))
    past = read_manifests(tmp_path)
    assert find_missing(items, lambda item: "r", past, tmp_path, True) == items[1:]
    with pytest.raises(OptionError, match="others for 6 items .the first is a, line 3"):
        find_missing(items, lambda item: "s", past, tmp_path, True)


def test_only_own_temporary_files_are_removed(tmp_path: Path) -> None:
    (item,) = make_items([Row("a", "x")], 0, ".mp4")
    others = {".b_0_1.png.123.tmp", ".notes.tmp", item.file}
    beside = item.file.replace(".mp4", ".json")  # of a clip
    for name in (f".{item.file}.123.tmp", f".{beside}.123.tmp", *others):
        (tmp_path / name).touch()
    remove_temporaries(tmp_path, [item])
    assert {each.name for each in tmp_path.iterdir()} == others


def test_one_process_writes_a_manifest(file: Path) -> None:
    """Also within one process: a lock belongs to an opened file. A refused process changes nothing
    of the one that runs."""
    running = Manifest(file)
    code = (
        "import sys; from pathlib import Path; from mmaccel.batch.manifest import Manifest\n"
        "from mmaccel.errors import BusyError\n"
        "try: Manifest(Path(sys.argv[1]))\nexcept BusyError: sys.exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(file)]).returncode == 7
    with pytest.raises(BusyError):
        Manifest(file)
    running.append({"still": "writable"})
    running.close()
    Manifest(file).close()
