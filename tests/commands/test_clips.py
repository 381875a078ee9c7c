"""`mmaccel animate` with a model that reads prompts: files, starts, prompt files, interrupts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mmaccel import Jacobi, TextToVideo
from mmaccel.cli import main
from mmaccel.pipelines.text_to_video.types import ClipModel
from tests.fixtures.media import image, read_webp
from tests.fixtures.prompt_files import make_in_parts, read_files, stop_at, write_rows
from tests.fixtures.tiny_model import CAPTIONS, FPS, N_FRAMES, N_TOKENS, build_tiny_clips

TWO = CAPTIONS[:2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_clips(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="module")
def pipe(model: Path) -> TextToVideo:
    return TextToVideo.from_pretrained(model)


def animate(model: Path, out: Path, *arguments: str) -> int:
    """Runs the command, with lossless files; returns its exit code."""
    fixed = ["--model", str(model), "--out", str(out), "--format", "webp"]
    return main(["animate", *arguments, *fixed])


def facts(out: Path) -> list[dict[str, Any]]:
    """The JSON files of a folder, by name."""
    files = sorted(out.glob("*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def test_clips_are_the_pipelines(model: Path, pipe: TextToVideo, tmp_path: Path) -> None:
    assert animate(model, tmp_path, *TWO, "--seed", "3", "--count", "2", "--window", "6") == 0
    texts = [TWO[0]] * 2 + [TWO[1]] * 2
    wanted = pipe(TWO, seed=3, num_videos_per_prompt=2, policy=Jacobi(window=6))
    files = sorted(tmp_path.glob("*.webp"))
    assert len(files) == len(wanted) == 4
    for file, said, text, clip in zip(files, facts(tmp_path), texts, wanted.clips, strict=True):
        assert torch.equal(read_webp(file), clip.frames)
        assert (said["prompt"], said["seed"], said["fps"]) == (text, clip.seed, FPS)
        assert (said["frames"], said["tokens"]) == (N_FRAMES, N_FRAMES * N_TOKENS)
        assert (said["policy"], said["guidance_scale"]) == ("jacobi", 2.0)
        assert said["passes"] == clip.passes and said["exactness"] == "bitwise"


def test_without_prompts_the_models_examples(
    model: Path, pipe: TextToVideo, tmp_path: Path
) -> None:
    assert animate(model, tmp_path, "--seed", "0") == 0
    assert [said["prompt"] for said in facts(tmp_path)] == list(pipe.clip_model.examples)


def test_everything_a_clip_depends_on_is_in_its_name(model: Path, tmp_path: Path) -> None:
    image().save(tmp_path / "a.png")
    start = ["--start", str(tmp_path / "a.png")]
    for more in ([], start, ["--negative", "blue"], ["--guidance-scale", "1"], ["--window", "5"]):
        assert animate(model, tmp_path / "out", CAPTIONS[0], "--seed", "0", *more) == 0
    assert len(list((tmp_path / "out").glob("*.webp"))) == 5
    assert sorted(said["n_given"] for said in facts(tmp_path / "out")) == [0, 0, 0, 0, 1]
    assert [said["start"] for said in facts(tmp_path / "out") if said["n_given"]] == ["a.png"]


def test_a_start_is_the_pipelines(model: Path, pipe: TextToVideo, tmp_path: Path) -> None:
    image().save(tmp_path / "a.png")
    arguments = ["--seed", "7", "--start", str(tmp_path / "a.png")]
    assert animate(model, tmp_path / "out", CAPTIONS[0], *arguments) == 0
    wanted = pipe(CAPTIONS[0], seed=7, start=image())[0]
    assert torch.equal(read_webp(next((tmp_path / "out").glob("*.webp"))), wanted.frames)


def test_a_gif_has_all_frames(model: Path, tmp_path: Path) -> None:
    fixed = ["--model", str(model), "--out", str(tmp_path), "--seed", "0", "--format", "gif"]
    assert main(["animate", CAPTIONS[0], *fixed]) == 0
    with Image.open(next(tmp_path.glob("*.gif"))) as opened:
        assert (opened.n_frames, opened.size) == (N_FRAMES, (16, 16))
        assert opened.info["duration"] == 1000 // FPS and opened.info["loop"] == 0


ROWS = [
    {"id": "a", "prompt": CAPTIONS[0], "n": 2},
    {"id": "b", "prompt": CAPTIONS[1], "seed": 4, "guidance_scale": 1.0},
    {"id": "c", "prompt": CAPTIONS[2], "policy": "autoregressive", "negative": "red"},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_rows(tmp_path, ROWS)


def test_a_prompt_file_is_made_once_whatever_its_parts(
    model: Path, pipe: TextToVideo, prompts: Path, tmp_path: Path
) -> None:
    job = ["--prompts", str(prompts), "--seed", "5"]
    made, in_shards, alone = make_in_parts(
        lambda out, *more: animate(model, out, *job, *more), tmp_path, ".webp"
    )
    assert len(made) == 4 and "b_0_4.webp" in made
    assert in_shards == made and alone == made
    clip = pipe(CAPTIONS[1], seed=4, guidance_scale=1)[0]
    assert torch.equal(read_webp(tmp_path / "all" / "b_0_4.webp"), clip.frames)
    (said,) = [each for each in facts(tmp_path / "all") if each["id"] == "b"]
    assert (said["prompt"], said["frames"], said["width"]) == (CAPTIONS[1], N_FRAMES, 16)


def test_a_prompt_file_goes_on_where_it_was_stopped(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["--prompts", str(prompts), "--seed", "5", "--batch-size", "1"]
    with stop_at(3, ClipModel):
        assert animate(model, tmp_path / "out", *job) == 130
    assert "2 clips generated" in capsys.readouterr().err
    assert len(read_files(tmp_path / "out", ".webp")) == 2
    assert not list((tmp_path / "out").glob(".*.tmp"))
    assert animate(model, tmp_path / "out", *job, "--resume") == 0
    assert "2 clips generated" in capsys.readouterr().err
    assert len(read_files(tmp_path / "out", ".webp")) == 4
    assert animate(model, tmp_path / "out", *job, "--resume") == 0
    assert "0 clips generated" in capsys.readouterr().err
    in_gif = [*job, "--resume", "--model", str(model), "--out", str(tmp_path / "out")]
    assert main(["animate", *in_gif, "--format", "gif"]) == 2
    assert "--resume: expected the format of the manifest" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.gif"))
    with_other = [*job, "--resume", "--window", "3"]
    assert animate(model, tmp_path / "out", *with_other) == 2
    assert "received others for" in capsys.readouterr().err


@pytest.mark.parametrize("made_of", [[CAPTIONS[0]], ["--prompts", "prompts.jsonl"]])
def test_odd_sides_and_mp4(
    made_of: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    odd = property(lambda model: (17, 16), lambda model, size: None)
    monkeypatch.setattr(ClipModel, "size", odd, raising=False)
    write_rows(tmp_path, [{"id": "a", "prompt": CAPTIONS[0]}])
    fixed = ["--model", str(model), "--out", "out", "--format", "mp4"]
    assert main(["animate", *made_of, *fixed]) == 2
    assert "--format: expected even sides for mp4" in capsys.readouterr().err


def test_an_interrupt_keeps_whole_clips(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stop_at(2, ClipModel):
        assert animate(model, tmp_path, *TWO, "--seed", "0") == 130
    assert "1 of 2 clips are in" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 2  # one clip and its JSON
