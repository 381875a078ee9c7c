"""Disks that are full or read-only: a clear error, no partial files, and `--resume` generates
the rest, to the byte.

The disks are small tmpfs, which only root can mount, on Linux.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mmaccel.batch.manifest import Manifest, sha256_of, to_line
from tests.batch.jobs import N_ITEMS, Jobs, content, lines, records

NO_SPACE = "No space left on device"

Mount = Callable[[Path, str], None]
Said = pytest.CaptureFixture[str]


@pytest.fixture
def mount() -> Iterator[Mount]:
    """Mounts a tmpfs with these options on a new folder, or gives a mounted one other options."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a small disk can be mounted by root on Linux alone")
    mounted: list[Path] = []

    def change(folder: Path, options: str) -> None:
        is_new = folder not in mounted
        folder.mkdir(exist_ok=True)
        how = ["-t", "tmpfs", "-o", options, "tmpfs"] if is_new else ["-o", f"remount,{options}"]
        done = subprocess.run(["mount", *how, str(folder)], capture_output=True, text=True)
        if done.returncode and is_new:
            pytest.skip(f"no tmpfs can be mounted here: {' '.join(done.stderr.split())}")
        assert done.returncode == 0, done.stderr
        if is_new:
            mounted.append(folder)

    yield change
    for folder in mounted:
        if subprocess.run(["umount", str(folder)]).returncode:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def error_of(capsys: Said) -> str:
    """The error: the same one line for people and for a program."""
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert not answer["ok"] and answer["error"]["code"] == "fatal"
    (line,) = [line for line in said.err.splitlines() if line.startswith("mmaccel: ")]
    assert line == f"mmaccel: {answer['error']['message']}" and "Traceback" not in said.err
    return line


def check_all_noted(out: Path, n_noted: int) -> None:
    """What the manifest has is there, whole; so is one image more at most."""
    noted = records(out)
    assert len(noted) == n_noted and all(record["status"] == "ok" for record in noted)
    assert all(sha256_of(out / record["file"]) == record["sha256"] for record in noted)
    assert 0 <= len(content(out)) - len(noted) <= 1


def assert_whole(out: Path, whole: Path) -> None:
    assert content(out) == content(whole) and lines(out) == lines(whole)


# a page is 4 KiB; an image takes one, and so does the manifest
@pytest.mark.skipif(os.sysconf("SC_PAGE_SIZE") != 4096, reason="the sizes are counted in pages")
@pytest.mark.parametrize(
    ("space", "wanted", "n_noted"),
    [
        ("size=4k", "a manifest that can be written", 0),
        ("size=20k", "space and permission to write an image", 4),
        ("size=1m,nr_inodes=5", "space and permission to write an image", 3),
    ],
)
def test_a_job_continues_after_a_full_disk(
    whole: Path, jobs: Jobs, mount: Mount, capsys: Said, space: str, wanted: str, n_noted: int
) -> None:
    mount(jobs.out, space)
    assert jobs.run("--json") == 1
    line = error_of(capsys)
    assert f"expected {wanted}, received: {NO_SPACE};" in line and "--resume" in line
    check_all_noted(jobs.out, n_noted)
    assert jobs.run("--json", "--resume") == 1  # as full as it was
    assert NO_SPACE in error_of(capsys)
    check_all_noted(jobs.out, n_noted)
    mount(jobs.out, "size=1m,nr_inodes=100")
    assert jobs.run("--json", "--resume") == 0
    assert json.loads(capsys.readouterr().out)["data"]["made_before"] == n_noted
    assert_whole(jobs.out, whole)


def test_a_line_that_fits_in_part_is_removed(tmp_path: Path, mount: Mount) -> None:
    disk = tmp_path / "disk"
    mount(disk, "size=4k")
    manifest = Manifest(disk / "manifest.jsonl")
    noted = [{"id": "a", "k": k, "status": "ok", "prompt": "x" * 250} for k in range(20)]
    n_lines = 4096 // len(to_line(noted[0]))  # and a part of one more
    try:
        for record in noted[:n_lines]:
            manifest.append(record)
        for record in noted[n_lines : n_lines + 2]:
            with pytest.raises(OSError, match=NO_SPACE):
                manifest.append(record)
        assert manifest.file.read_bytes() == b"".join(map(to_line, noted[:n_lines]))
        mount(disk, "size=1m")
        for record in noted[n_lines:]:
            manifest.append(record)
        assert manifest.file.read_bytes() == b"".join(map(to_line, noted))
    finally:
        manifest.close()


def test_a_dry_run_reads_a_read_only_disk(
    whole: Path, jobs: Jobs, mount: Mount, capsys: Said
) -> None:
    mount(jobs.out, "size=1m")
    assert jobs.run() == 0
    jobs.manifest.write_bytes(b"".join(jobs.manifest.read_bytes().splitlines(keepends=True)[:-1]))
    mount(jobs.out, "ro")
    capsys.readouterr()
    assert jobs.run("--resume", "--dry-run", "--json") == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert (data["made_before"], data["to_make"]) == (N_ITEMS - 1, 1)
    assert jobs.run("--resume", "--json") == 1
    assert "Read-only file system" in error_of(capsys)
    mount(jobs.out, "rw")
    assert jobs.run("--resume") == 0
    assert_whole(jobs.out, whole)


def test_a_read_only_disk_is_refused_before_a_model_is_loaded(
    tmp_path: Path, mount: Mount, capsys: Said
) -> None:
    jobs = Jobs(tmp_path, tmp_path / "no model")
    mount(jobs.out, "size=1m")
    mount(jobs.out, "ro")
    assert jobs.run("--json") == 1
    line = error_of(capsys)
    assert f"--out: expected a folder that can be written, received {str(jobs.out)!r}" in line
    assert "Read-only file system" in line and list(jobs.out.iterdir()) == []
