"""Training of `moving-scenes`: batches, cut clips, slots of frames, resuming, what is exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mmaccel import TextToVideo
from mmaccel.demo.moving_scenes.data import VALIDATION_SEED, make_clips
from mmaccel.tokenizers_vq.autoencoder import ImageTokenizer, save_tokenizer
from scripts.training import moving_scenes
from scripts.training.data import IGNORE
from scripts.training.generator import GeneratorTraining, train_generator
from scripts.training.moving_scenes import MovingScenes, encode_clips, keep_slots
from scripts.training.moving_scenes_export import export_moving_scenes
from tests.training.conftest import SMALL

FRAME = 64  # tokens


@pytest.fixture
def clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work folder with a random tokenizer of 8 x 8 pixels a token; the generator is tiny."""
    sizes = {"WIDTH": 16, "INNER": 16, "DEPTH": 1, "HEADS": 2, "_CHECKED": 4, "_CHECK_BATCH": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(moving_scenes, name, size)
    torch.manual_seed(0)
    config = {**SMALL, "patch": 8}
    save_tokenizer(ImageTokenizer(**config), config, tmp_path / "tokenizer")
    return tmp_path


def test_a_batch_is_the_same_whenever_it_is_asked_for(clips: Path) -> None:
    task = MovingScenes(clips, n_frames=2)
    ids, labels = task.batch(3, 2)
    again = MovingScenes(clips, n_frames=2).batch(3, 2)
    assert torch.equal(ids, again[0]) and torch.equal(labels, again[1])
    assert ((labels != IGNORE).sum(1) == 2 * FRAME).all()
    assert not torch.equal(ids, task.batch(4, 2)[0])
    assert task.distinct(3, 2) == 6


def test_a_stage_of_short_clips_sees_their_first_frames(clips: Path) -> None:
    task = MovingScenes(clips, n_frames=2, one_shape=True, drop=0.0)
    whole = MovingScenes(clips, drop=0.0)
    short = task.checks[0][1]
    full = whole.checks[0][1]
    for row, long in zip(short, full, strict=True):
        assert torch.equal(row[row != IGNORE], long[long != IGNORE][: 2 * FRAME])
    assert task.batch(0, 2)[0].shape[1] == task.batch(1, 2)[0].shape[1] == task.width
    drawn = make_clips(VALIDATION_SEED, range(2))[2]
    tokens = encode_clips(task.tokenizer, drawn[:, :2])
    assert short[short != IGNORE].tolist() == tokens.flatten().tolist()


def test_captions_are_dropped_for_guidance(clips: Path) -> None:
    gone = MovingScenes(clips, n_frames=1, drop=1.0)
    assert gone.batch(0, 2)[0][:, :2].tolist() == [[gone.words.bos, gone.words.boi]] * 2
    kept = MovingScenes(clips, n_frames=1, drop=0.0).batch(0, 2)[0]
    assert (kept[:, 1] > gone.words.pad).all()


def test_slots_by_hand() -> None:
    no = IGNORE
    labels = torch.tensor([[no, no, 5, 6, 7, 8], [no, 1, 2, 3, 4, no]])
    assert keep_slots(labels, 1, 3).tolist() == [[no, no, no, 6, 7, no], [no, no, 2, 3, no, no]]


def test_a_stopped_run_goes_on_with_longer_clips_and_is_exported(clips: Path) -> None:
    for steps, n_frames in ((2, 2), (3, 10)):
        plan = GeneratorTraining(steps=steps, fall=1, batch=2, snapshots=())
        train_generator(clips, MovingScenes(clips, n_frames), plan)
    lines = [json.loads(line) for line in (clips / "generator.jsonl").read_text().splitlines()]
    done = [line for line in lines if "loss" in line]
    assert [line["step"] for line in done] == [2, 3]
    last = done[-1]
    mean = (last["first_frame"] + 9 * last["later_frames"]) / 10
    assert last["validation"] == pytest.approx(mean, abs=1e-3)
    export_moving_scenes(clips, clips / "exported")
    made = TextToVideo.from_pretrained(clips / "exported")("a red circle rests", seed=0)
    assert made[0].frames.shape == (10, 64, 64, 3)
