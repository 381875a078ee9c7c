"""Events of a job for another program: on stdout alone, and what becomes of a job nobody reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmaccel.commands.generate_batch import Reports
from tests.batch.test_batch import N_ITEMS, ROOT, ROWS, command

pty = pytest.importorskip("pty", reason="needs pseudo-terminals")


def start(folder: Path, model: Path, **streams: Any) -> subprocess.Popen[bytes]:
    """The command as a process of its own, telling events."""
    arguments = command(folder, ROWS, model, "--json-stream", "--batch-size", "1")
    return subprocess.Popen(
        [sys.executable, "-m", "mmaccel.cli", *arguments],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "60"}, **streams,
    )  # fmt: skip


def test_events_stay_on_stdout_where_stderr_is_a_terminal(
    tiny_folder: Path, tmp_path: Path
) -> None:
    screen, far = pty.openpty()
    with start(tmp_path, tiny_folder, stdout=subprocess.PIPE, stderr=far) as process:
        os.close(far)
        assert process.stdout is not None
        told = process.stdout.read().splitlines()
        shown = b""
        try:
            while part := os.read(screen, 65536):
                shown += part
        except OSError:  # how Linux ends what nobody writes any more
            pass
        os.close(screen)
    assert process.returncode == 0
    *events, end = map(json.loads, told)
    assert [event["event"] for event in events] == ["start"] + ["item"] * N_ITEMS
    assert end["ok"] and end["data"]["made"] == N_ITEMS
    assert b"images" in shown and b'"event"' not in shown


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
