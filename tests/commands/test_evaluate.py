"""`mmaccel evaluate`: images, clips, speech and the exit code of exactness."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mmaccel import Jacobi
from mmaccel.catalog import POLICIES, Entry
from mmaccel.cli import main
from mmaccel.demo.features import hear, load_features
from mmaccel.demo.moving_scenes.data import make_clips
from mmaccel.demo.scenes.data import make_scenes
from mmaccel.evaluation.quality.distances import frechet_distance, squared_mmd
from mmaccel.evaluation.quality.features import extract_all, open_extractor
from mmaccel.outputs.sound_files import read_sound, write_sound
from mmaccel.outputs.video_files import write_video
from mmaccel.results import Generation
from tests.fixtures.tiny_model import CAPTIONS

pytestmark = pytest.mark.slow


def evaluate(*arguments: object) -> int:
    return main(["evaluate", *map(str, arguments)])


def save(folder: Path, images: torch.Tensor, captions: list[str] | None = None) -> Path:
    folder.mkdir()
    lines = []
    for k, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{k:03d}.png")
        if captions is not None:
            lines.append(json.dumps({"file": f"{k:03d}.png", "prompt": captions[k], "seed": k}))
    if captions is not None:
        (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def scenes() -> tuple[list[str], torch.Tensor]:
    _, captions, images = make_scenes(11, range(24))
    return captions, images


def test_images_against_a_folder(scenes: Any, tmp_path: Path, capsys: Any) -> None:
    captions, images = scenes
    own = save(tmp_path / "own", images[:12], captions[:12])
    others = save(tmp_path / "others", images[12:] // 2)
    report_file, items_file = tmp_path / "r" / "report.json", tmp_path / "items.jsonl"
    files = ("--json", report_file, "--items", items_file)
    assert evaluate("pictures", own, "--against", others, *files) == 0
    report, said = json.loads(report_file.read_text()), capsys.readouterr().out
    extract = open_extractor("scenes")
    first, second = (extract_all([p], extract) for p in (images[:12], images[12:] // 2))
    assert report["frechet"]["distance"] == pytest.approx(frechet_distance(first, second))
    assert report["kid"]["value"] == pytest.approx(squared_mmd(first, second))
    assert (report["n"], report["n_against"], report["kid"]["n_second"]) == (12, 12, 12)
    assert report["frechet"]["bias"].startswith("biased") and "biased" in said
    assert 0 < report["frechet"]["floor"] and report["machine"]["versions"]["torch"]
    assert report["captions"]["n"] == 12 and report["captions"]["shares"]["whole"] > 0.8
    lines = [json.loads(line) for line in items_file.read_text().splitlines()]
    assert [line["seed"] for line in lines] == list(range(12))
    right = sum(line["verdict"]["whole"] for line in lines)
    assert right / 12 == pytest.approx(report["captions"]["shares"]["whole"])


def test_a_single_image_is_no_set(scenes: Any, tmp_path: Path, capsys: Any) -> None:
    folder = save(tmp_path / "own", scenes[1][:1])
    assert evaluate("pictures", folder, "--against", "scenes", "--count", 2) == 2
    assert "FOLDER: expected at least 2 rows" in capsys.readouterr().err


def test_clips_against_a_folder_and_drawn_ones(tmp_path: Path, capsys: Any) -> None:
    _, captions, clips = make_clips(11, range(8))
    frames = clips.permute(0, 1, 3, 4, 2)
    for folder in ("own", "still"):
        (tmp_path / folder).mkdir()
    for k, (caption, clip) in enumerate(zip(captions, frames, strict=True)):
        write_video(tmp_path / "own" / f"{k}.webp", clip, 5.0, {"prompt": caption, "seed": k})
        still = clip[:1].expand(10, -1, -1, -1)  # one image in the file
        write_video(tmp_path / "still" / f"{k}.webp", still, 5.0, {"frames": 10})
    files = ("--json", tmp_path / "r.json", "--items", tmp_path / "items.jsonl")
    assert evaluate("clips", tmp_path / "own", "--against", tmp_path / "still", *files) == 0
    report, said = json.loads((tmp_path / "r.json").read_text()), capsys.readouterr().out
    extract = load_features("moving-scenes").extract
    features = [extract(part) for part in (clips, clips[:, :1].expand_as(clips))]
    wanted = frechet_distance(*(part.numpy() for part in features))
    assert report["frechet"]["distance"] == pytest.approx(wanted)
    assert "FVD-own" in said and (report["n"], report["n_against"]) == (8, 8)
    assert report["captions"]["n"] == 8 and report["captions"]["shares"]["whole"] > 0.7
    lines = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().splitlines()]
    assert [line["seed"] for line in lines] == list(range(8))
    drawn = ("--against", "moving-scenes", "--count", 4, "--json", tmp_path / "r.json")
    assert evaluate("clips", tmp_path / "own", *drawn) == 0
    assert json.loads((tmp_path / "r.json").read_text())["n_against"] == 4


def test_speech_against_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sounds = 0.1 * torch.randn(6, 17_000, generator=torch.Generator().manual_seed(0))
    for folder in ("own", "others"):
        (tmp_path / folder).mkdir()
    for k, sound in enumerate(sounds):
        write_sound(tmp_path / ("own", "others")[k % 2] / f"{k}.wav", sound, 16_000, {})
    file = tmp_path / "r.json"
    both = (tmp_path / "own", "--against", tmp_path / "others", "--json", file)
    assert evaluate("speech", *both) == 0
    report = json.loads(file.read_text())
    assert (report["n"], report["frechet"]["n_first"]) == (3, 6)  # two windows of each
    features = [
        torch.cat([hear(read_sound(f)[0]) for f in sorted(part.iterdir())
                   if f.suffix == ".wav"])
        for part in (tmp_path / "own", tmp_path / "others")
    ]  # fmt: skip
    wanted = frechet_distance(*(part.numpy() for part in features))
    assert report["frechet"]["distance"] == pytest.approx(wanted)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_ears.py").write_text(
        "def loudness(sound, rate):\n    return sound.abs().reshape(-1, 1)[: rate // 8000]\n"
    )
    assert evaluate("speech", *both, "--features", "my_ears:loudness") == 0
    report = json.loads(file.read_text())
    assert (report["frechet"]["n_first"], report["frechet"]["width"]) == (6, 1)


class Wrong(Jacobi):
    """Generates other tokens than it guarantees."""

    def sample(self, *args: Any, **options: Any) -> Generation:
        generation = super().sample(*args, **options)
        generation.tokens[:, 3] = (generation.tokens[:, 3] + 1) % 30
        return generation


def test_the_exit_code_of_exactness(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = tmp_path / "exact.json"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{CAPTIONS[0]}\n\n{CAPTIONS[1]}\n")
    options = ("--count", 3, "--samples", 2000, "--prompts", prompts, "--json", file)
    policy = ("--policy", "jacobi", "--set", "window=4")
    assert evaluate("exactness", tiny_folder, *policy, *options) == 0
    report = json.loads(file.read_text())
    names = [check["name"] for check in report["checks"]]
    enumerable = "distribution of an enumerable model"
    batches = ["plain loop in batches", "policy in batches"]
    assert names == ["greedy", "same seeds", *batches, enumerable]
    assert all(check["holds"] for check in report["checks"]) and report["broken"] == []
    assert report["captions"] == [CAPTIONS[0], CAPTIONS[1], CAPTIONS[0]]
    assert report["policy"].startswith("Jacobi(window=4")
    capsys.readouterr()
    target = f"{Wrong.__module__}:Wrong"
    monkeypatch.setitem(sys.modules, Wrong.__module__, sys.modules[__name__])
    monkeypatch.setitem(POLICIES, "jacobi", Entry(target, "planted"))
    assert evaluate("exactness", tiny_folder, *policy, *options) == 3
    report = json.loads(file.read_text())
    assert report["broken"][:2] == ["greedy", "same seeds"] and enumerable in report["broken"]
    assert "BROKEN" in capsys.readouterr().out
    first = report["checks"][1]["figures"]["first_divergence"]
    assert first == [3, 3, 3]
