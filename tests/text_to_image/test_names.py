"""File names of images: the same image has one name, and no other image has it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from mmaccel.cli import main
from mmaccel.outputs.image_files import image_name
from mmaccel.pipelines.hosts.loading.sources import content_hash
from tests.fixtures.tiny_model import CAPTIONS


def names(tmp_path: Path, model: Path | str, *arguments: str) -> set[str]:
    """Names of all files of one run, the sheet included."""
    out = tmp_path / str(len(list(tmp_path.iterdir())))
    fixed = ["--model", str(model), "--out", str(out), "--count", "2", "--seed", "0"]
    assert main(["generate", *fixed, *arguments]) == 0
    return {file.name for file in out.iterdir()}


def test_spelling_does_not_matter(tiny_folder: Path, tmp_path: Path, monkeypatch) -> None:
    first = names(tmp_path, tiny_folder, "a red circle", "--seed", "18")
    copy = shutil.copytree(tiny_folder, tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    assert names(tmp_path, copy, "a red circle", "--seed", "18") == first
    assert names(tmp_path, "copy", " a red circle ", "--seed", "18") == first and len(first) == 3


@pytest.mark.slow
def test_names_depend_on_the_batch_size_where_results_are_up_to_rounding(
    tiny_folder: Path, tmp_path: Path
) -> None:
    def run(policy: str, dtype: str, size: str) -> set[str]:
        options = ["--policy", policy, "--dtype", dtype, "--batch-size", size]
        return names(tmp_path, tiny_folder, CAPTIONS[0], *options)

    assert run("jacobi", "float32", "1") == run("jacobi", "float32", "2")
    assert not run("jacobi", "bfloat16", "1") & run("jacobi", "bfloat16", "2")
    assert not run("sjd", "float32", "1") & run("sjd", "float32", "2")


@pytest.mark.slow
def test_another_number_of_images_is_beside_them(tiny_folder: Path, tmp_path: Path) -> None:
    options = ["--policy", "sjd", "--batch-size", "2", "--seed", "0", "--model", str(tiny_folder)]
    for count in ("3", "4"):
        out = ["--count", count, "--out", str(tmp_path)]
        assert main(["generate", CAPTIONS[0], *options, *out]) == 0
    assert len(list(tmp_path.glob("0*.png"))) == 7


def test_other_files_are_other_images(tmp_path: Path) -> None:
    parts = ("config.json", "tokenizer.json", "words.json")
    weights = ("model.safetensors", "pytorch_model.bin", "model-00002-of-00002.safetensors")
    for file in parts:
        (tmp_path / file).write_text("{}")
    hashes = set()
    for file in (*weights, *parts):
        for content in (b"{}  ", b"{ }"):
            (tmp_path / file).write_bytes(content)
            hashes.add(content_hash(tmp_path))
    assert len(hashes) == 2 * len(weights + parts)


def test_names_are_short_and_begin_with_the_seed() -> None:
    long = "-".join(["triangle"] * 60)
    name = image_name(2**64 - 1, long, "jacobi", {})
    assert name.startswith("18446744073709551615-triangle-triangle-triangle-jacobi-")
    assert image_name(2**64 - 1, "a\n red,circle", "sjd", {})[20:].startswith("-a-red-circle-sjd-")
    assert len(name) < 100
    odd = image_name(3, f"a w/circle ?\0{'x' * 300}", "jacobi", {})
    assert odd.startswith(f"0003-a-wcircle-{'x' * 20}-jacobi-") and len(odd) < 100


def test_a_dtype_that_rounds_is_not_reported_as_bitwise(tiny_folder: Path, tmp_path: Path) -> None:
    options = ["--dtype", "bfloat16", "--out", str(tmp_path), "--seed", "0"]
    assert main(["generate", "a red\n circle", "--model", str(tiny_folder), *options]) == 0
    (file,) = tmp_path.glob("0000-*.png")
    with Image.open(file) as image:
        facts = json.loads(image.text["mmaccel"])
        caption, settings = image.text["parameters"].splitlines()
    assert facts["exactness"] == "up to rounding" and facts["device"] == "cpu"
    assert facts["dtype"] == "bfloat16" and "dtype: bfloat16" in settings
    assert "Exactness: up to rounding" in settings and "bitwise" not in settings
    assert caption == "a red circle" and settings.startswith("Steps: 16, Sampler: jacobi, ")
