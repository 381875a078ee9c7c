"""`mmaccel animate`: starts, prompts behind them, examples and formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmaccel.outputs.video_files import read_frames
from mmaccel.pipelines.hosts.loading.sources import content_hash
from mmaccel.pipelines.text_to_video.types import ClipModel
from tests.fixtures.jobs import Command
from tests.fixtures.media import image
from tests.fixtures.shared import reading_folders, reading_pipe
from tests.fixtures.tiny_model import CAPTIONS


@pytest.fixture
def clips(tmp_path: Path) -> Command:
    return Command("clips", tmp_path)


@pytest.fixture
def continued(tmp_path: Path) -> Command:
    return Command("continuations", tmp_path)


def facts_of(command: Command) -> list[dict[str, Any]]:
    return [command.facts(file) for file in command.files]


def test_a_start_is_the_pipelines(clips: Command) -> None:
    start = clips.folder / "a.png"
    image().save(start)
    assert clips.run(CAPTIONS[0], "--start", start) == 0
    ((_, pixels),) = clips.expect(CAPTIONS[:1], [3], start=image())
    (facts,) = facts_of(clips)
    assert clips.read(clips.files[0]) == pixels and (facts["start"], facts["n_given"]) == (
        "a.png",
        1,
    )


def test_a_prompt_behind_the_start_is_read(continued: Command, capsys: Any) -> None:
    model, codec, encoder = reading_folders()
    parts = ("--model", model, "--codec", codec, "--text-encoder", encoder)
    assert continued.run(*continued.inputs, "a red fox", *parts) == 0
    ((facts,), wanted) = facts_of(continued), reading_pipe()(image(), prompt="a red fox", seed=3)
    assert continued.read(continued.files[0]) == wanted[0].frames.numpy().tobytes()
    assert (facts["prompt"], facts["text_encoder"]) == ("a red fox", content_hash(encoder))
    assert continued.run(*continued.inputs, *parts) == 2
    assert "prompt: expected what happens in the clip" in capsys.readouterr().err
    assert continued.run(*continued.inputs, "a blue fox", *parts) == 0
    assert len(continued.files) == 2


def test_an_mp4_can_be_continued(continued: Command) -> None:
    """The name of the folder looks like a protocol of FFmpeg. A start has at most 9 frames."""
    continued.out = continued.folder / "clips:today"
    assert continued.run(*continued.inputs, "--format", "mp4") == 0
    (clip,) = continued.out.glob("*.mp4")
    assert len(read_frames(clip, 99)) == 17
    assert continued.run(clip, *continued.inputs) == 0
    assert sorted(facts["n_given"] for facts in facts_of(continued)) == [1, 9]


def test_odd_sides_and_mp4(clips: Command, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    odd = property(lambda model: (17, 16), lambda model, size: None)
    monkeypatch.setattr(ClipModel, "size", odd, raising=False)
    assert clips.run("--format", "mp4") == 2
    assert "--format: expected even sides for mp4" in capsys.readouterr().err
