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
from PIL import Image

from mmaccel.batch.manifest import Manifest, sha256_of, to_line
from mmaccel.cli import main
from tests.fixtures.tiny_model import CAPTIONS

ROWS = [{"id": f"r{k}", "prompt": CAPTIONS[k % 3], "n": 2} for k in range(3)]
N_ITEMS = 6
NO_SPACE = "No space left on device"

Mount = Callable[[Path, str], None]


def command(folder: Path, model: Path, *more: str) -> list[str]:
    """Arguments of a batch into `folder / "out"`, of images made two at a time."""
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    return ["generate", "--prompts", str(file), "--model", str(model), "--out",
            str(folder / "out"), "--seed", "0", "--batch-size", "2", *more]  # fmt: skip


def content(out: Path) -> dict[str, bytes]:
    """Name and bytes of every image; each can be opened, and nothing else is there."""
    files = sorted(file for file in out.iterdir() if file.name != "manifest.jsonl")
    assert all(file.suffix == ".png" and file.name[0] != "." for file in files)
    for file in files:
        with Image.open(file) as image:
            image.load()
    return {file.name: file.read_bytes() for file in files}


def recorded(out: Path) -> dict[str, str]:
    """Name and checksum of every image in the manifest, whose lines are all whole."""
    data = (out / "manifest.jsonl").read_bytes()
    assert not data or data.endswith(b"\n")
    records = list(map(json.loads, data.splitlines()))
    assert all(record["status"] == "ok" for record in records)
    return {record["file"]: record["sha256"] for record in records}


def check_all_recorded(out: Path, n_spare: int) -> None:
    """What the manifest has is there, whole; so are up to `n_spare` images more."""
    sums, there = recorded(out), content(out)
    assert all(sha256_of(out / name) == sums[name] for name in sums)
    assert 0 <= len(there) - len(sums) <= n_spare


@pytest.fixture(scope="module")
def whole(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(command(folder, tiny_folder)) == 0
    assert len(content(folder / "out")) == N_ITEMS
    return folder / "out"


def assert_whole(out: Path, whole: Path) -> None:
    assert content(out) == content(whole) and recorded(out) == recorded(whole)
    lines = [sorted((at / "manifest.jsonl").read_bytes().splitlines()) for at in (out, whole)]
    assert lines[0] == lines[1]


@pytest.fixture
def mount() -> Iterator[Mount]:
    """Mounts a tmpfs with these options on a new folder, or gives a mounted one other options."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a small disk can be mounted by root on Linux alone")
    mounted: list[Path] = []

    def change(folder: Path, options: str) -> None:
        kind = ["-o", f"remount,{options}"] if folder in mounted else ["-t", "tmpfs", "-o", options]
        folder.mkdir(exist_ok=True)
        own = [] if folder in mounted else ["tmpfs"]
        done = subprocess.run(
            ["mount", *kind, *own, str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode and folder not in mounted:
            pytest.skip(f"no tmpfs can be mounted here: {' '.join(done.stderr.split())}")
        assert done.returncode == 0, done.stderr
        if folder not in mounted:
            mounted.append(folder)

    try:
        yield change
    finally:
        for folder in mounted:
            if subprocess.run(["umount", str(folder)], check=False).returncode:
                subprocess.run(["umount", "--lazy", str(folder)], check=True)


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The error: the same one line for people and for a program."""
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert not answer["ok"] and answer["error"]["code"] == "fatal"
    (line,) = [line for line in said.err.splitlines() if line.startswith("mmaccel: ")]
    assert line == f"mmaccel: {answer['error']['message']}" and "Traceback" not in said.err
    return line


# a page is 4 KiB; an image takes one, and so does the manifest
@pytest.mark.parametrize(
    ("space", "wanted", "n_recorded"),
    [
        ("size=4k", "a manifest that can be written", 0),
        ("size=20k", "space and permission to write an image", 4),
        ("size=1m,nr_inodes=5", "space and permission to write an image", 3),
    ],
)
def test_a_job_continues_after_a_full_disk(
    whole: Path, tiny_folder: Path, tmp_path: Path, mount: Mount,
    capsys: pytest.CaptureFixture[str], space: str, wanted: str, n_recorded: int,
) -> None:  # fmt: skip
    if os.sysconf("SC_PAGE_SIZE") != 4096:
        pytest.skip("the sizes are counted in pages of 4 KiB, which this system has not")
    out, arguments = tmp_path / "out", command(tmp_path, tiny_folder, "--json")
    mount(out, space)
    assert main(arguments) == 1
    line = error_of(capsys)
    assert f"expected {wanted}, received: {NO_SPACE};" in line and "--resume" in line
    check_all_recorded(out, 1)
    before = recorded(out)
    assert len(before) == n_recorded

    assert main([*arguments, "--resume"]) == 1  # as full as it was
    assert NO_SPACE in error_of(capsys)
    check_all_recorded(out, 1)
    assert recorded(out) == before

    mount(out, "size=1m,nr_inodes=100")
    assert main([*arguments, "--resume"]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["made_before"] == n_recorded
    assert_whole(out, whole)


def test_a_line_that_fits_in_part_is_removed(tmp_path: Path, mount: Mount) -> None:
    disk = tmp_path / "disk"
    mount(disk, "size=4k")
    manifest = Manifest(disk / "manifest.jsonl")
    records = [{"id": "a", "k": k, "status": "ok", "prompt": "x" * 250} for k in range(20)]
    n_lines = 4096 // len(to_line(records[0]))  # and a part of one more
    try:
        for record in records[:n_lines]:
            manifest.append(record)
        for record in records[n_lines : n_lines + 2]:
            with pytest.raises(OSError, match=NO_SPACE):
                manifest.append(record)
        assert manifest.file.read_bytes() == b"".join(map(to_line, records[:n_lines]))
        mount(disk, "size=1m")
        for record in records[n_lines:]:
            manifest.append(record)
        assert manifest.file.read_bytes() == b"".join(map(to_line, records))
    finally:
        manifest.close()


def test_a_dry_run_reads_a_read_only_disk(
    whole: Path, tiny_folder: Path, tmp_path: Path, mount: Mount,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    mount(out, "size=1m")
    assert main(command(tmp_path, tiny_folder)) == 0
    (out / "manifest.jsonl").write_bytes(
        b"".join((out / "manifest.jsonl").read_bytes().splitlines(keepends=True)[:-1])
    )
    mount(out, "ro")
    capsys.readouterr()
    assert main(command(tmp_path, tiny_folder, "--resume", "--dry-run", "--json")) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert (data["made_before"], data["to_make"]) == (N_ITEMS - 1, 1)
    assert main(command(tmp_path, tiny_folder, "--resume", "--json")) == 1
    assert "Read-only file system" in error_of(capsys)
    mount(out, "rw")
    assert main(command(tmp_path, tiny_folder, "--resume")) == 0
    assert_whole(out, whole)


def test_a_read_only_disk_is_refused_before_a_model_is_loaded(
    whole: Path, tiny_folder: Path, tmp_path: Path, mount: Mount,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    mount(out, "size=1m")
    mount(out, "ro")
    assert main(command(tmp_path, tmp_path / "no model", "--json")) == 1
    line = error_of(capsys)
    assert f"--out: expected a folder that can be written, received {str(out)!r}" in line
    assert "Read-only file system" in line and list(out.iterdir()) == []
    mount(out, "rw")
    assert main(command(tmp_path, tiny_folder, "--resume")) == 0
    assert_whole(out, whole)
