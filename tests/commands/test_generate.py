"""`mmaccel generate`: text lines of images, sheets, comparisons, terminals and the collector."""

from __future__ import annotations

import gc
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmaccel import loading
from mmaccel.batch.worker import Worker
from mmaccel.commands import sheets
from tests.fixtures.jobs import Command
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS

Said = pytest.CaptureFixture[str]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command("images", tmp_path / "bilder-é")


def sheet_of(command: Command, kind: str) -> Path:
    (sheet,) = command.out.glob(f"{kind}-*.png")
    return sheet


def test_other_tools_read_an_image(command: Command, capsys: Said) -> None:
    assert command.run(CAPTIONS[0], "--window", 5, "--negative", "red") == 0
    (file,) = command.out.iterdir()  # a single image has no sheet
    assert capsys.readouterr().out.startswith(f"{file}: {N_TOKENS} tokens in ")
    with Image.open(file) as opened:
        prompt, negative, settings = opened.text["parameters"].splitlines()  # type: ignore[attr-defined]
    assert (prompt, negative) == (CAPTIONS[0], "Negative prompt: red")
    begin = f"Steps: {N_TOKENS}, Sampler: jacobi, CFG scale: 2.0, Seed: 3, Size: 16x16, "
    assert settings.startswith(begin) and ', Policy: "jacobi(window=5, drafts=auto)", ' in settings


def test_a_sheet_shows_the_first_of_many_examples(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.setattr(sheets, "_MAX_SHOWN", 4)
    shown: list[Any] = []
    draw = sheets.draw_sheet
    monkeypatch.setattr(sheets, "draw_sheet", lambda p, **o: shown.append(p) or draw(p, **o))
    assert command.run("--count", 6, "--batch-size", 3) == 0
    ((panel,),) = shown
    assert len(command.files) == 6 and sheet_of(command, "contact").is_file()
    examples = [command.facts(file)["prompt"] for file in command.files]
    assert len(panel.images) == 4 and panel.prompts == examples[:4]
    assert panel.note.endswith("(the first 4 of 6)")
    cost = r": 96 tokens in \d+ forward passes, [\d.]+ tokens a pass for each row, [\d.]+ s$"
    assert re.search(cost, capsys.readouterr().out, re.M)


def test_compare_says_yes_only_when_it_is_so(command: Command, capsys: Said) -> None:
    fixed = (CAPTIONS[1], "--count", 3, "--compare", "--batch-size", 500)
    assert command.run(*fixed, "--window", 6) == 0
    said = capsys.readouterr().out
    assert "yes" in said and "The same images, token for token" in said
    assert re.search(r"s, [\d.]+ times as fast as token by token$", said, re.M)
    assert sheet_of(command, "compare").is_file()
    for other in (("--policy", "mc-sjd"), ("--kv-cache", "streaming-llm:budget=3:sinks=1")):
        assert command.run(*fixed, *other) == 0
        said = capsys.readouterr().out
        assert "no, " in said and "of 3 images identical" in said


def test_a_terminal_with_ascii_only(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert command.run(CAPTIONS[0], "--compare") == 0
    sys.stdout.flush()
    assert b"bilder-\\xe9" in printed.getvalue() and len(list(command.out.iterdir())) == 2


@pytest.mark.parametrize("is_job", [False, True])
def test_cycles_are_collected_again_once_a_model_is_open(
    command: Command, monkeypatch: pytest.MonkeyPatch, is_job: bool
) -> None:
    """They are not while it loads. After a wrong command the collector is as before it."""
    seen: list[bool] = []
    load, run_all = loading.open_pipeline, Worker.run_all
    for owner, name, whole in ((loading, "open_pipeline", load), (Worker, "run_all", run_all)):

        def watch(*given: Any, whole: Any = whole, **options: Any) -> Any:
            seen.append(gc.isenabled())
            return whole(*given, **options)

        monkeypatch.setattr(owner, name, watch)
    assert (command.job() if is_job else command.make(1)) == 0
    assert seen == [False, True] and gc.isenabled()
    assert command.make(1, "--top-p", 5) == 2 and gc.isenabled()


def test_ctrl_c_before_the_first_image_is_reported(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "open_pipeline", stop)
    assert command.make(1) == 130
    assert capsys.readouterr().err == "mmaccel: stopped\n"
    assert command.job("--json") == 130
    assert '"error": {"code": "interrupted", "message": "stopped"}' in capsys.readouterr().out
