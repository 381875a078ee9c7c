"""The reports of a job: a bar for people, events for programs."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest

from mmaccel.commands import terminal
from mmaccel.commands.jobs import Reports


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("is_screen", [False, True])
def test_events_are_lines_of_json_and_one_screen_shows_a_bar_or_events(
    capsys: Any, monkeypatch: Any, is_streaming: bool, is_screen: bool
) -> None:
    screen = io.StringIO()
    console = terminal._open_console(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr(terminal, "stderr_console", lambda: console)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_screen, raising=False)
    record = {"id": "b", "k": 1, "prompt": "a [red] fox", "error": "\x1b[31mno"}
    with Reports("clip", 2, is_streaming) as reports:
        reports.report("item", {"id": "a", "k": 0})
        reports.report("failed", record)
        reports.report("note", "torn")
    events: list[dict[str, Any]] = [{"event": "item", "item": {"id": "a", "k": 0}}]
    events += [{"event": "failed", "item": record}, {"event": "note", "text": "torn"}]
    said = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert said == (events if is_streaming else [])
    assert ("2/2" in screen.getvalue()) != (is_streaming and is_screen)
    failed = "failed: b, clip 1 ('a [red] fox'): \N{REPLACEMENT CHARACTER}[31mno"
    assert failed in screen.getvalue() and "note: torn" in screen.getvalue()
