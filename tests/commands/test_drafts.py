"""`--drafts` and `--tree`: names of methods and folders of coarse models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mmaccel import TextToImage
from mmaccel.cli import main
from mmaccel.samplers.drafting.coarse_model import FOLDER, describe_coarse
from tests.fixtures.jobs import Command
from tests.fixtures.tiny_coarse import MINUTES, build_coarse
from tests.fixtures.tiny_model import CAPTIONS


@pytest.fixture(scope="module")
def coarse(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a random coarse model for the tiny model."""
    folder = tmp_path_factory.mktemp("made") / "coarse"
    return build_coarse(TextToImage.from_pretrained(tiny_folder), folder)


def test_a_comparison_says_that_drafts_are_coarse(
    coarse: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command("images", tmp_path)
    assert command.make(1, "--drafts", coarse, "--window", 8, "--compare") == 0
    said = capsys.readouterr().out
    assert "jacobi, coarse drafts" in said and "The same image, token for token" in said
    (file,) = command.files
    drafts = command.facts(file)["policy_options"]["drafts"]
    assert drafts == {"folder": coarse, "candidates": 16, "rounds": None}


def test_a_tree_is_in_the_name_and_in_the_facts(tmp_path: Path) -> None:
    command = Command("images", tmp_path)
    fixed = ("--drafts", "token-recycling", "--window", 10)
    for tree in ((), ("--tree", "sequoia:nodes=4"), ("--tree", "comb")):
        assert command.make(1, *fixed, *tree) == 0
    trees = [command.facts(file)["policy_options"]["tree"] for file in command.files]
    assert len({command.read(file) for file in command.files}) == 1
    assert sum(tree is not None and tree.startswith("Sequoia(nodes=4") for tree in trees) == 1
    assert len(trees) == 3


@pytest.mark.slow
def test_bench_compares_draft_sources_in_one_run(
    tiny_folder: Path, coarse: str, tmp_path: Path
) -> None:
    """A model whose folder has a coarse model drafts with it."""
    model, file = tmp_path / "model", tmp_path / "found.json"
    shutil.copytree(tiny_folder, model)
    shutil.copytree(coarse, model, dirs_exist_ok=True)
    options = ["--policies", "jacobi,prompt-lookup", "--windows", "8", "--guidance", "1"]
    options += ["--count", "1", "--json", str(file), "--model", str(model)]
    assert main(["bench", CAPTIONS[1], *options, "--drafts", f"neighbour,coarse,{coarse}"]) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    rows = [(row["policy"], row["drafts"]) for row in report["rows"]]
    jacobi = [("jacobi", source) for source in ("neighbour", "coarse", coarse)]
    assert rows == [("autoregressive", None), *jacobi, ("prompt-lookup", "ngram")]
    assert [row["identical"] for row in report["rows"][:4]] == [1] * 4
    assert report["coarse"] == {name: describe_coarse(coarse) for name in ("coarse", coarse)}
    assert report["coarse"][coarse]["minutes"] == MINUTES
    assert report["coarse"][coarse]["bytes"] == (Path(coarse) / FOLDER.weights).stat().st_size
