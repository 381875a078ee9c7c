"""What a job shows while it runs, as a terminal has it: how many, how fast, what failed."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from mmaccel.commands import generate_batch
from mmaccel.commands.generate_batch import Reports, one_line

STEERING = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


class Clock:
    """Says the time it was set to."""

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
    monkeypatch.setattr(
        terminal, "stderr_console", lambda: Console(file=text, force_terminal=True, width=120)
    )
    yield text


def last_bar(screen: io.StringIO) -> str:
    """The bar as it stands when the job has ended."""
    shown = STEERING.sub("", screen.getvalue()).replace("\r", "\n").split("\n")
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
            reports.made({"id": "a", "k": 0})
    assert f" {len(seconds)}/9 {rate} " in last_bar(screen)


def test_no_rate_is_shown_before_there_is_one(clock: Clock, screen: io.StringIO) -> None:
    with Reports(9, is_streaming=False):
        pass
    assert " 0/9 " in last_bar(screen) and "/s" not in last_bar(screen)


def test_what_failed_is_counted_and_makes_nobody_faster(
    clock: Clock, screen: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    with Reports(3, is_streaming=False) as reports:
        clock.now = 101.0
        reports.made({"id": "a", "k": 0})
        clock.now = 104.0
        reports.failed({"id": "b", "k": 1, "prompt": "a [red] fox", "error": "\x1b[31mno"})
    assert " 2/3 0.25/s " in last_bar(screen)
    assert "failed: b, image 1 ('a [red] fox'): \N{REPLACEMENT CHARACTER}[31mno" in (
        STEERING.sub("", screen.getvalue())
    )
    assert capsys.readouterr().out == ""


def test_a_clock_that_stands_still_is_no_failure(clock: Clock, screen: io.StringIO) -> None:
    with Reports(1, is_streaming=False) as reports:
        reports.made({"id": "a", "k": 0})
    assert " 1/1 1000000000.00/s " in last_bar(screen)


def test_events_are_lines_of_json_and_the_bar_is_not_among_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = {"id": "b", "k": 1, "prompt": "x", "error": "no"}
    with Reports(2, is_streaming=True) as reports:
        reports.emit("start", items=2)
        reports.made({"id": "a", "k": 0})
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


def test_foreign_text_is_one_line_of_at_most_500_characters() -> None:
    assert one_line("a\nb\tc\x1bd") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}c" + (
        "\N{REPLACEMENT CHARACTER}d"
    )
    assert one_line("x" * 900) == "x" * 500
