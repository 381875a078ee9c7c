"""`mmaccel answer`: the pipeline's answer, the picture, the comparison, and what stays of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mmaccel
from mmaccel import ImageToText
from mmaccel.cli import main
from mmaccel.demo import loading as demo_loading
from mmaccel.pipelines.image_to_text import pipeline, views
from mmaccel.pipelines.image_to_text.kept_picture import draw_kept
from tests.fixtures.tiny_vqa import QUESTION, build_vqa, save_scenes, save_vqa
from tests.vision_language.runs import reduces

N_NEW = 6
RANDOM = ("--visual-tokens", "random", "--keep", 0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vqa(tmp_path_factory.mktemp("vqa"))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [str(file) for file in save_scenes(tmp_path)]


def run(model: Path, *arguments: object) -> int:
    fixed = ("--model", model, "--max-tokens", N_NEW, "--json", "a.json")
    return main([str(each) for each in ("answer", *arguments, *fixed)])


def report() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(Path("a.json").read_text(encoding="utf-8"))
    return read


def test_the_answer_is_the_pipelines(model: Path, files: list[str], capsys: Any) -> None:
    assert run(model, *files, QUESTION) == 0
    made = ImageToText.from_pretrained(model)(files, QUESTION, max_new_tokens=N_NEW)
    said = capsys.readouterr().out
    assert said.startswith(f"{made[0].text} … (cut, see --max-tokens)\n")
    assert "1040 of 1040" in said and "bitwise" in said
    (found,) = report()["runs"]
    assert (found["text"], found["tokens"]) == (made[0].text, len(made[0].tokens))
    assert (found["n_visual"], found["n_kept"], found["is_finished"]) == (1040, 1040, False)
    assert found["passes"] == made[0].passes and report()["images"] == files
    assert not Path("out").exists()


@pytest.mark.slow
def test_policies_and_seeds_reach_the_pipeline(model: Path, files: list[str], capsys: Any) -> None:
    def ask(*options: object) -> Any:
        assert run(model, files[0], QUESTION, *options) == 0
        return report()["runs"][0]["text"], report()["runs"][0]["stats"]

    plain, stats = ask("--policy", "autoregressive")
    assert stats["policy"] == "Autoregressive()"
    text, stats = ask("--window", 5)
    assert text == plain and stats["policy"] == "Jacobi(window=5, drafts='auto')"
    assert ", drawn" not in capsys.readouterr().out
    drawn, stats = ask("--temperature", 3)
    found = re.match(r"seed: (\d+), drawn; ", capsys.readouterr().out)
    assert found is not None and stats["seed"] == int(found[1])
    assert ask("--temperature", 3, "--seed", found[1])[0] == drawn
    assert len({ask("--temperature", 3, "--seed", seed)[0] for seed in range(3)}) > 1


@pytest.mark.slow
@reduces
def test_compare_answers_both_and_draws_what_stays(
    model: Path, files: list[str], capsys: Any
) -> None:
    options = ("--visual-tokens", "dart", "--keep", 0.25, "--compare")
    assert run(model, files[0], QUESTION, *options) == 0
    (picture,) = Path("out").glob("0000-what-colour-is-dart-*.png")
    assert run(model, files[0], QUESTION, *options, "-o", "kept/a.png") == 0
    assert picture.read_bytes() == Path("kept/a.png").read_bytes()
    plain = ImageToText.from_pretrained(model)
    fewer = ImageToText(plain.model, plain.processor, visual_tokens=mmaccel.DART(keep=0.25))
    wanted = [each(files[0], QUESTION, max_new_tokens=N_NEW)[0] for each in (plain, fewer)]
    said = capsys.readouterr().out
    assert said.startswith(f"all tokens: {wanted[0].text}")
    assert f"\ndart 0.25: {wanted[1].text}" in said
    assert "the model on 130 of 520 visual tokens" in said
    assert [r["visual_tokens"] for r in report()["runs"]] == ["all tokens", "dart 0.25"]
    assert report()["runs"][1]["images"] == [{"n_visual": 520, "n_kept": 130}]
    assert report()["picture"] == "kept/a.png"
    drawn = np.asarray(Image.open("kept/a.png"))
    assert (drawn == np.asarray(draw_kept(wanted[1].images))).all()


@reduces
def test_a_model_without_places_has_no_picture(
    model: Path, files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def without_pixels(*arguments: Any) -> Any:
        rows = views.find_image_tokens(*arguments)
        return [[views.ImageTokens(t.kept, t.view, t.row, t.column) for t in r] for r in rows]

    monkeypatch.setattr(pipeline, "find_image_tokens", without_pixels)
    assert run(model, files[0], QUESTION, *RANDOM) == 0
    assert "note: no picture; kept tokens: expected visual tokens" in capsys.readouterr().out
    assert run(model, files[0], QUESTION, *RANDOM, "-o", "a.png") == 1
    assert "kept tokens: expected" in capsys.readouterr().err and not Path("a.png").exists()


@reduces
def test_what_the_model_refuses_makes_no_folder(model: Path, files: list[str], capsys: Any) -> None:
    lazy = ("--visual-tokens", "lazy-llm", "--keep", 0.5, "--kv-cache", "snapkv")
    assert run(model, files[0], QUESTION, *lazy) == 2
    said = capsys.readouterr().err
    assert "beside LazyLLM(keep=0.5" in said and not Path("out").exists()


def test_the_embedded_model_is_the_default_and_says_how_to_make_it(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(demo_loading, "WEIGHTS", tmp_path / "weights")
    assert main(["answer", files[0], QUESTION]) == 2
    assert "python -m scripts.training scenes-vqa" in capsys.readouterr().err
    build_vqa().save_pretrained(tmp_path / "weights" / "scenes-vqa")
    assert main(["answer", files[0], QUESTION, "--max-tokens", "2"]) == 0
    assert "520 of 520" in capsys.readouterr().out
