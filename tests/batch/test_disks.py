"""Disks that are full or read-only: a clear error, no partial files, and `--resume` makes the rest.

The disks are small tmpfs, which only root can mount, on Linux. What a full disk does to one write
is in the other files, with errors that are raised.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmaccel.batch.manifest import sha256_of
from tests.fixtures.jobs import Command, lines, records, whole_of

NO_SPACE = "No space left on device"

Mount = Callable[[str], None]


@pytest.fixture
def mount(images: Command) -> Iterator[Mount]:
    """Mounts a tmpfs with these options as the folder of a job, or gives it other options."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a small disk can be mounted by root on Linux alone")
    mounted: list[Path] = []

    def change(options: str) -> None:
        how = ["-o", f"remount,{options}"] if mounted else ["-t", "tmpfs", "-o", options, "tmpfs"]
        images.out.mkdir(exist_ok=True)
        done = subprocess.run(["mount", *how, str(images.out)], capture_output=True, text=True)
        if done.returncode and not mounted:
            pytest.skip(f"no tmpfs can be mounted here: {' '.join(done.stderr.split())}")
        assert done.returncode == 0, done.stderr
        mounted.append(images.out)

    yield change
    if mounted and subprocess.run(["umount", str(images.out)]).returncode:
        subprocess.run(["umount", "--lazy", str(images.out)], check=True)


def error_of(capsys: Any) -> str:
    """The error: the same one line for people and for a program."""
    said = capsys.readouterr()
    error = json.loads(said.out)["error"]
    assert error["code"] == "fatal" and said.err.splitlines()[-1] == f"mmaccel: {error['message']}"
    return str(error["message"])


# a page is 4 KiB; an image takes one, and so does the manifest
@pytest.mark.skipif(os.sysconf("SC_PAGE_SIZE") != 4096, reason="the sizes are counted in pages")
@pytest.mark.parametrize(
    ("space", "wanted", "n"),
    [
        ("size=20k", "space and permission to write an image", 4),
        ("size=1m,nr_inodes=5", "space and permission to write an image", 3),
    ],
)
def test_a_job_continues_after_a_full_disk(
    images: Command, mount: Mount, capsys: Any, space: str, wanted: str, n: int
) -> None:
    mount(space)
    for more in ((), ("--resume",)):  # which finds it as full as it was
        assert images.job("--json", *more) == 1
        line = error_of(capsys)
        assert NO_SPACE in line and (more or f"expected {wanted}, received: " in line)
        noted = records(images.out)
        assert len(noted) == n and 0 <= len(images.content) - n <= 1
        assert all(sha256_of(images.out / each["file"]) == each["sha256"] for each in noted)
    mount("size=1m,nr_inodes=100")
    assert images.job("--json", "--resume") == 0
    assert json.loads(capsys.readouterr().out)["data"]["made_before"] == n
    whole = whole_of("images")
    assert images.content == whole.content and lines(images.out) == lines(whole.out)


def test_a_read_only_disk_takes_a_dry_run_and_loads_no_model(
    images: Command, mount: Mount, capsys: Any
) -> None:
    mount("size=1m")
    assert images.job() == 0
    images.manifest.write_bytes(b"".join(images.manifest.read_bytes().splitlines(True)[:-1]))
    mount("ro")
    capsys.readouterr()
    assert images.job("--resume", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["data"]["to_make"] == 1
    assert images.job("--resume", "--json", "--model", "none") == 1
    line = error_of(capsys)
    assert "--out: expected a folder that can be written" in line and "Read-only" in line
