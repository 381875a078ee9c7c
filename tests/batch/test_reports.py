"""The reports of a job: a progress bar for people, events for programs."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmaccel.commands.jobs import batch as batch_job
from mmaccel.commands.jobs.batch import Reports, one_line
from tests.batch.jobs import N_ITEMS, Jobs
from tests.fixtures.forking import Forker

CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


class Clock:
    """A clock with a settable time."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(batch_job, "time", SimpleNamespace(perf_counter=clock))
    return clock


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    monkeypatch.setattr("mmaccel.commands.terminal.stderr_console", lambda: console)
    return text


def last_bar(screen: io.StringIO) -> str:
    """The last state of the bar."""
    shown = CONTROL.sub("", screen.getvalue()).replace("\r", "\n").split("\n")
    return [line for line in shown if line.startswith("images")][-1]


@pytest.mark.parametrize(
    ("seconds", "rate"), [((2.0,), "0.50/s"), ((0.5, 1.0), "2.00/s"), ((1.0, 2.0, 8.0), "0.38/s")]
)
@pytest.mark.parametrize("has_failed", [False, True])
def test_images_a_second_are_shown(
    clock: Clock,
    screen: io.StringIO,
    capsys: pytest.CaptureFixture[str],
    seconds: tuple[float, ...],
    rate: str,
    has_failed: bool,
) -> None:
    """Failures count, but not in the rate."""
    record = {"id": "b", "k": 1, "prompt": "a [red] fox", "error": "\x1b[31mno"}
    with Reports(9, is_streaming=False) as reports:
        for second in seconds:
            clock.now = 100.0 + second
            reports.finished({"id": "a", "k": 0})
        if has_failed:
            reports.failed(record)
    assert f" {len(seconds) + has_failed}/9 {rate} " in last_bar(screen)
    said = "failed: b, image 1 ('a [red] fox'): \N{REPLACEMENT CHARACTER}[31mno"
    assert (said in CONTROL.sub("", screen.getvalue())) == has_failed
    assert capsys.readouterr().out == ""


def test_events_are_lines_of_json_and_the_bar_is_not_among_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = {"id": "b", "k": 1, "prompt": "x", "error": "no"}
    with Reports(2, is_streaming=True) as reports:
        reports.emit("start", items=2)
        reports.finished({"id": "a", "k": 0})
        reports.failed(record)
        reports.note("torn")
    said = capsys.readouterr()
    assert list(map(json.loads, said.out.splitlines())) == [
        {"event": "start", "items": 2},
        {"event": "item", "item": {"id": "a", "k": 0}},
        {"event": "failed", "item": record},
        {"event": "note", "text": "torn"},
    ]
    assert "note: torn" in said.err and "2/2" in said.err


def test_error_messages_are_one_line_of_at_most_500_characters() -> None:
    assert one_line("a\nb\tc\x1bd") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}c" + (
        "\N{REPLACEMENT CHARACTER}d"
    )
    assert one_line("x" * 900) == "x" * 500


@pytest.mark.slow
def test_events_stay_on_stdout_where_stderr_is_a_terminal(forker: Forker, jobs: Jobs) -> None:
    pty = pytest.importorskip("pty", reason="needs pseudo-terminals")
    screen, other = pty.openpty()
    arguments = jobs.arguments("--json-stream")
    terminal = f"import os, sys; os.dup2(os.open({os.ttyname(other)!r}, os.O_RDWR), 2)\n"
    terminal += "sys.stderr = open(2, 'w', closefd=False)"
    child = forker.start(*arguments, before=terminal)
    code = child.wait()
    os.close(other)
    shown = b""
    try:
        while part := os.read(screen, 65536):
            shown += part
    except OSError:  # the end of a terminal on Linux
        pass
    os.close(screen)
    assert code == 0, shown
    *events, end = map(json.loads, child.printed()[0].splitlines())
    assert [event["event"] for event in events] == ["start"] + ["item"] * N_ITEMS
    assert end["ok"] and end["data"]["made"] == N_ITEMS
    assert b"images" in shown and b'"event"' not in shown


@pytest.mark.slow
def test_a_job_whose_reader_goes_ends_and_can_go_on(
    forker: Forker, jobs: Jobs, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    child = forker.start(*jobs.arguments("--json-stream", "--batch-size", "1"), stdout=pipe)
    with pipe.open() as events:
        events.readline()
    assert child.wait() == 1
    said = child.stderr.read_text()
    assert "--json-stream: expected a reader of stdout" in said and "--resume" in said
    assert "Traceback" not in said and "Exception ignored" not in said
    assert 0 < len(jobs.manifest.read_bytes().splitlines()) < N_ITEMS


@pytest.mark.parametrize(
    ("is_streaming", "is_screen"), [(True, True), (True, False), (False, True)]
)
def test_one_screen_shows_a_bar_or_events(
    monkeypatch: pytest.MonkeyPatch, screen: io.StringIO, is_streaming: bool, is_screen: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_screen, raising=False)
    with Reports(3, is_streaming=is_streaming) as reports:
        reports.finished({"id": "a", "k": 0})
    assert ("1/3" in screen.getvalue()) != (is_streaming and is_screen)
