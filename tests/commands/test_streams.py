"""stdout and stderr that are closed, full or read by nobody: words, exit codes, and whole files."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.architecture.source import ROOT
from tests.batch.test_gallery import make_run
from tests.fixtures.forking import Forker
from tests.fixtures.tiny_model import CAPTIONS

LIMIT = 1 << 20  # bytes; a file of this size is full, which stands in for a full disk


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A file that takes no byte more from a process with the limit."""
    file = tmp_path / "full"
    with file.open("wb") as opened:
        opened.truncate(LIMIT)
    return file


def run(shell: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `mmaccel` in a shell, which gives it streams: `shell` follows the command."""
    command = f'"$0" -m mmaccel.cli "$@" {shell}'
    return subprocess.run(
        ["bash", "-c", command, sys.executable, *arguments],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, timeout=30, check=False,
        capture_output=True, **options,
    )  # fmt: skip


def test_an_error_with_stderr_closed_is_one_object_on_stdout() -> None:
    done = run("2>&-", "generate", "--prompts", "x", "--json", "--nonsense")
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["error"]["code"] == "usage" and done.returncode == 2


@pytest.mark.parametrize("shell", [">&- 2>&-", "<&- >&- 2>&-"])
def test_files_are_whole_whatever_is_closed(tmp_path: Path, shell: str) -> None:
    """The page would get the number of a closed stream, and then what is printed."""
    pages = []
    for k, closed in enumerate(("", shell)):
        (tmp_path / str(k)).mkdir()
        folder = make_run(tmp_path / str(k) / "run", ["one", "two"])
        (folder / "broken.png").write_bytes(b"no image")
        done = run(closed, "gallery", str(folder))
        assert done.returncode == 0 and "Traceback" not in done.stderr
        pages.append((folder / "gallery.html").read_bytes())
    assert pages[0] == pages[1]


def test_a_full_stdout_is_said_and_no_traceback(full: Path, tmp_path: Path) -> None:
    run_folder = make_run(tmp_path / "run", ["one"])

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))

    done = run(f">>'{full}'", "gallery", str(run_folder), preexec_fn=limit)
    assert done.returncode == 1 and (run_folder / "gallery.html").is_file()
    (line,) = done.stderr.splitlines()
    assert line.startswith("mmaccel: stdout: expected space for the result, received: ")
    done = run(f"2>>'{full}'", "gallery", str(run_folder), preexec_fn=limit)
    assert done.returncode == 0 and done.stdout.strip() == str(run_folder / "gallery.html")


def test_a_reader_that_goes_ends_no_command_badly(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ["one"])
    (folder / "broken.png").write_bytes(b"no image")
    for shell, *arguments in (("| true", "models"), ("2>&1 | true", "gallery", str(folder))):
        done = run(f"{shell}; exit ${{PIPESTATUS[0]}}", *arguments)
        assert (done.returncode, done.stderr.count("Error")) == (0, 0), done.stderr


@pytest.mark.parametrize("option", ["--json", "--json-stream"])
def test_a_job_without_space_for_its_result(
    forker: Forker, tiny_folder: Path, tmp_path: Path, full: Path, option: str
) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("\n".join(CAPTIONS))
    arguments = ["--prompts", str(prompts), "--out", str(out), "--model", str(tiny_folder)]
    child = forker.start("generate", *arguments, option, stdout=full, limit=LIMIT)
    assert child.wait() == 1
    err = child.stderr.read_text()
    assert "Traceback" not in err and "Exception ignored" not in err
    assert "received: File too large" in err and full.stat().st_size == LIMIT
    if option == "--json":  # the stream ends the job, as its reader does
        assert len(list(out.glob("*.png"))) == 3
    for file in out.glob("*.png"):
        with Image.open(file) as image:
            image.load()
    child = forker.start("generate", *arguments, "--resume", "--json")
    assert child.wait() == 0 and json.loads(child.printed()[0])["data"]["items"] == 3


def test_a_closed_stderr_ends_no_job(forker: Forker, tiny_folder: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("\n".join(CAPTIONS))
    arguments = ["--prompts", str(prompts), "--out", str(out), "--model", str(tiny_folder)]
    child = forker.start("generate", *arguments, "--json-stream", closed=["stderr"])
    assert child.wait() == 0
    events = [json.loads(line) for line in child.printed()[0].splitlines()]
    assert [event.get("event") for event in events] == ["start", *["item"] * 3, None]
    lines = (out / "manifest.jsonl").read_bytes().splitlines()
    assert all(json.loads(line)["status"] == "ok" for line in lines) and len(lines) == 3
