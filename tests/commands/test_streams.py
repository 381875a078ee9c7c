"""stdout and stderr that are closed, full or read by nobody: words, exit codes, and whole files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.fixtures.forking import Forker
from tests.fixtures.jobs import N_ITEMS, Command, records

pytestmark = pytest.mark.slow

LIMIT = 1 << 20  # bytes; a file of this size is full, which stands in for a full disk


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A file that takes no byte more from a process with the limit."""
    file = tmp_path / "full"
    with file.open("wb") as opened:
        opened.truncate(LIMIT)
    return file


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command("images", tmp_path)


def test_a_file_is_whole_whatever_is_closed(forker: Forker, command: Command) -> None:
    """The file would get the number of a closed stream, and then what is printed."""
    assert command.make(1) == 0
    made, closed = command.content, ("stdout", "stderr")
    command.files[0].unlink()
    arguments = command.arguments(command.inputs[0])
    assert forker.start(*arguments, before="import os; os.close(0)", closed=closed).wait() == 0
    assert command.content == made


def test_a_full_stdout_is_said_and_no_traceback(forker: Forker, full: Path) -> None:
    child = forker.start("models", stdout=full, limit=LIMIT)
    assert child.wait() == 1
    *_, line = child.stderr.read_text().splitlines()
    assert line.startswith("mmaccel: stdout: expected space for the result, received: ")


def test_a_job_without_space_for_its_events(forker: Forker, command: Command, full: Path) -> None:
    arguments = command.arguments(*command.prompts())
    child = forker.start(*arguments, "--json-stream", stdout=full, limit=LIMIT)
    assert child.wait() == 1
    err = child.stderr.read_text()
    assert "Traceback" not in err and "Exception ignored" not in err
    assert "received: File too large" in err and full.stat().st_size == LIMIT
    child = forker.start(*arguments, "--resume", "--json")
    assert child.wait() == 0 and json.loads(child.printed()[0])["data"]["items"] == N_ITEMS


def test_a_closed_stderr_ends_no_job(forker: Forker, command: Command) -> None:
    arguments = command.arguments(*command.prompts(), "--json-stream")
    child = forker.start(*arguments, closed=["stderr"])
    assert child.wait() == 0
    events = [json.loads(line) for line in child.printed()[0].splitlines()]
    assert [event.get("event") for event in events] == ["start", *["item"] * N_ITEMS, None]
    assert [record["status"] for record in records(command.out)] == ["ok"] * N_ITEMS


def test_a_job_whose_reader_goes_ends_and_can_go_on(
    forker: Forker, command: Command, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    arguments = command.arguments(*command.prompts(), "--json-stream", "--batch-size", 1)
    child = forker.start(*arguments, stdout=pipe)
    with pipe.open() as events:
        events.readline()
    assert child.wait() == 1
    said = child.stderr.read_text()
    assert "--json-stream: expected a reader of stdout" in said and "--resume" in said
    assert "Traceback" not in said and "Exception ignored" not in said
    assert 0 < len(records(command.out)) < N_ITEMS
