"""`mmaccel animate`: starts, prompts behind them, examples and formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmaccel.outputs.video_files import read_frames
from mmaccel.pipelines.loading.sources import content_hash
from mmaccel.pipelines.text_to_video.types import ClipModel
from tests.fixtures.jobs import Command, pipe
from tests.fixtures.media import image
from tests.fixtures.shared import reading_folders, reading_pipe
from tests.fixtures.tiny_model import CAPTIONS, FPS, N_FRAMES


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


def test_without_prompts_the_models_examples(clips: Command) -> None:
    assert clips.run("--count", 2) == 0
    examples = pipe("clips").clip_model.examples
    assert [facts["prompt"] for facts in facts_of(clips)] == [e for e in examples for _ in range(2)]


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


def test_starts_of_one_name_do_not_overwrite_each_other(continued: Command) -> None:
    """Their first frames are equal."""
    files = [continued.folder / name / "c.webp" for name in ("red", "blue")]
    for file in files:
        pages = [Image.new("RGB", (48, 32), file.parent.name) for _ in range(8)]
        for k, page in enumerate(pages):
            page.putpixel((k, 0), (255, 255, 255))  # equal pages would become one
        file.parent.mkdir()
        image().save(file, save_all=True, append_images=pages, lossless=True)
    assert continued.run(*files) == 0 and len(continued.files) == 2


def test_a_gif_has_all_frames(clips: Command) -> None:
    assert clips.run(CAPTIONS[0], "--format", "gif") == 0
    with Image.open(next(clips.out.glob("*.gif"))) as opened:
        assert (opened.n_frames, opened.size) == (N_FRAMES, (16, 16))  # type: ignore[attr-defined]
        assert opened.info["duration"] == 1000 // FPS and opened.info["loop"] == 0


@pytest.mark.parametrize("is_job", [False, True])
def test_odd_sides_and_mp4(
    clips: Command, is_job: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    odd = property(lambda model: (17, 16), lambda model, size: None)
    monkeypatch.setattr(ClipModel, "size", odd, raising=False)
    assert (clips.job if is_job else clips.run)("--format", "mp4") == 2
    assert "--format: expected even sides for mp4" in capsys.readouterr().err
