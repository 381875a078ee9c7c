"""The reports of a job: a progress bar for people, events for programs."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmaccel.commands import generate_batch
from mmaccel.commands.generate_batch import Reports, one_line
from tests.batch.test_batch import N_ITEMS, ROOT, ROWS, command

CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


class Clock:
    """A clock with a settable time."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(generate_batch, "time", SimpleNamespace(perf_counter=clock))
    return clock


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    monkeypatch.setattr("mmaccel.commands.terminal.stderr_console", lambda: console)
    yield text


def last_bar(screen: io.StringIO) -> str:
    """The last state of the bar."""
    shown = CONTROL.sub("", screen.getvalue()).replace("\r", "\n").split("\n")
    return [line for line in shown if line.startswith("images")][-1]


@pytest.mark.parametrize(
    ("seconds", "rate"), [((2.0,), "0.50/s"), ((0.5, 1.0), "2.00/s"), ((1.0, 2.0, 8.0), "0.38/s")]
)
def test_images_a_second_are_shown(
    clock: Clock, screen: io.StringIO, seconds: tuple[float, ...], rate: str
) -> None:
    with Reports(9, is_streaming=False) as reports:
        for second in seconds:
            clock.now = 100.0 + second
            reports.finished({"id": "a", "k": 0})
    assert f" {len(seconds)}/9 {rate} " in last_bar(screen)


def test_failures_count_but_not_in_the_rate(
    clock: Clock, screen: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    with Reports(3, is_streaming=False) as reports:
        clock.now = 101.0
        reports.finished({"id": "a", "k": 0})
        clock.now = 104.0
        reports.failed({"id": "b", "k": 1, "prompt": "a [red] fox", "error": "\x1b[31mno"})
    assert " 2/3 0.25/s " in last_bar(screen)
    assert "failed: b, image 1 ('a [red] fox'): \N{REPLACEMENT CHARACTER}[31mno" in (
        CONTROL.sub("", screen.getvalue())
    )
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


def start(folder: Path, model: Path, **streams: Any) -> subprocess.Popen[bytes]:
    """Start the command in a process of its own, with events."""
    arguments = command(folder, ROWS, model, "--json-stream", "--batch-size", "1")
    return subprocess.Popen(
        [sys.executable, "-m", "mmaccel.cli", *arguments],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "60"}, **streams,
    )  # fmt: skip


@pytest.mark.slow
def test_events_stay_on_stdout_where_stderr_is_a_terminal(
    tiny_folder: Path, tmp_path: Path
) -> None:
    pty = pytest.importorskip("pty", reason="needs pseudo-terminals")
    screen, other = pty.openpty()
    with start(tmp_path, tiny_folder, stdout=subprocess.PIPE, stderr=other) as process:
        os.close(other)
        assert process.stdout is not None
        printed = process.stdout.read().splitlines()
        shown = b""
        try:
            while part := os.read(screen, 65536):
                shown += part
        except OSError:  # the end of a terminal on Linux
            pass
        os.close(screen)
    assert process.returncode == 0
    *events, end = map(json.loads, printed)
    assert [event["event"] for event in events] == ["start"] + ["item"] * N_ITEMS
    assert end["ok"] and end["data"]["made"] == N_ITEMS
    assert b"images" in shown and b'"event"' not in shown


@pytest.mark.slow
def test_a_job_whose_reader_goes_ends_and_can_go_on(tiny_folder: Path, tmp_path: Path) -> None:
    pipe: Any = subprocess.PIPE
    with start(tmp_path, tiny_folder, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read().decode()
    assert process.returncode == 1
    assert "--json-stream: expected a reader of stdout" in said and "--resume" in said
    assert "Traceback" not in said and "Exception ignored" not in said
    made = (tmp_path / "out" / "manifest.jsonl").read_bytes().splitlines()
    assert 0 < len(made) < N_ITEMS


@pytest.mark.parametrize(
    ("is_streaming", "is_screen"), [(True, True), (True, False), (False, True)]
)
def test_one_screen_shows_a_bar_or_events(
    monkeypatch: pytest.MonkeyPatch, is_streaming: bool, is_screen: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_screen, raising=False)
    reports = Reports(3, is_streaming=is_streaming)
    assert reports._bar.disable == (is_streaming and is_screen)
