"""The scripts in examples/ run, are short, and print what they promise."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmaccel.catalog import MODELS
from tests.architecture.source import ROOT
from tests.fixtures.next_scale import build_folder
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_model import masked_beside_plain
from tests.fixtures.tiny_vlms import encodes_first
from tests.fixtures.tiny_vqa import save_vqa

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OF_IMAGES = ("text_to_image", "many_seeds", "compare_policies", "masked_images", "next_scale")
SAID = {
    "text_to_image": r"the same tokens: True",
    "many_seeds": r"128 tokens in \d+ forward passes",
    "compare_policies": r"'window': 32.*bitwise +32 tokens in \d+ forward passes",
    "masked_images": r"the same tokens: True",
    "next_scale": r"scale by scale:  14 tokens in 3 .*the same tokens: True",
    "language_model": r"the same tokens: True",
    "trees": r"the same tokens: True",
    "long_context": r"exact with respect to the model on \d+ of \d+ cached entries.*SnapKV.*Quest",
    "image_to_text": r"520 of 520 visual tokens: .*\n110 of 520 visual tokens: ",
}


def save_language_model(folder: Path) -> Path:
    """A tiny language model with a tokenizer of numbers."""
    model = build_lm("llama")
    words = {"<unk>": 0} | {str(n): n for n in range(1, model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_runs(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    own = []
    if example.stem in ("language_model", "long_context"):
        own = [str(save_language_model(tmp_path / "lm"))]
    if example.stem in OF_IMAGES:  # tokens of random weights, sixteen an image
        words = dict.fromkeys(MODELS["scenes"].examples[0].split())
        folders = masked_beside_plain(tmp_path, words=list(words))
        own = [str(folders[example.stem != "masked_images"])]
    if example.stem == "next_scale":
        own = [str(build_folder(tmp_path / "scales", list(words)))]
    if example.stem == "image_to_text":  # of tiny random weights
        own = [str(save_vqa(tmp_path / "vqa"))]
        if not encodes_first():
            pytest.skip("this transformers encodes images in its first pass")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example), *own])
    runpy.run_path(str(example), run_name="__main__")
    assert re.search(SAID[example.stem], capsys.readouterr().out, re.S)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_is_short_and_says_how_it_is_run(example: Path) -> None:
    text = example.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 30
    assert f"\npython examples/{example.name}" in text.split('"""')[1]
