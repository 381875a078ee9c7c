"""Checkpoints with a wrong or truncated file are refused in one line, by Python and by commands."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel import weight_folders
from mmaccel.cli import main
from mmaccel.commands.doctor import try_checkpoint
from mmaccel.errors import OptionError, UnsupportedModelError
from tests.fixtures.checkpoints import SIZES
from tests.fixtures.tiny_lms import build_lm

Spoil = Callable[[Path], Any]
Parts = dict[str, tuple[Path, Path]]
WEIGHTS = "model.safetensors"
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
C2I = "c2i_B_64.pt"


def merge(name: str = "config.json", **changes: Any) -> Spoil:
    """Change values of a JSON file."""

    def spoil(folder: Path) -> None:
        file = folder / name
        content = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(content | changes), encoding="utf-8")

    return spoil


def write(name: str, text: str) -> Spoil:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def truncate(name: str) -> Spoil:
    return lambda folder: os.truncate(folder / name, 100)


def shard(folder: Path) -> None:
    """Replace the weights by an index of two files, one of them missing."""
    (folder / WEIGHTS).rename(folder / "part.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "part.safetensors", "b": "two.safetensors"}}
    write(WEIGHTS + ".index.json", json.dumps(index))(folder)


def flatten(folder: Path) -> None:
    """A tensor of one side in place of the embeddings."""
    content = torch.load(folder / C2I, weights_only=False)
    content.get("model", content)["tok_embeddings.weight"] = torch.zeros(4)
    torch.save(content, folder / C2I)


CASES: dict[str, tuple[str, Spoil, str]] = {  # name -> checkpoint, how it is spoilt, what is said
    "empty": ("words", write("config.json", ""), "a JSON object in .*config.json"),
    "deep": ("words", write("config.json", DEEP), "brackets within brackets"),
    "no type": ("words", merge(model_type="none"), "model type `none`"),
    "a layer less": ("words", merge(num_hidden_layers=1), "surplus, such as"),
    "words": ("words", merge("words.json", words=7), "words in .* expected a list"),
    "no weights": ("lm", lambda folder: (folder / WEIGHTS).unlink(), f"no file named {WEIGHTS}"),
    "missing shard": ("lm", shard, "two.safetensors"),
    "processor": ("emu3", write("tokenizer.json", "{"), "none that transformers can read"),
    "flat": ("llamagen-c2i", flatten, "2 sides, received"),
    "snac": ("orpheus", merge(decoder_dim=32), "codec: .* snac refuses .*size mismatch"),
    "codec": ("llasa", truncate(WEIGHTS), "codec: .* that transformers refuses"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_spoilt_folder_is_refused_in_one_line(
    name: str,
    built: Callable[[str], Path],
    tiny_folder: Path,
    speech_folders: Parts,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kind, spoil, said = CASES[name]
    folder = tmp_path / "copy"
    load: Callable[[], Any]
    if kind in speech_folders:  # whose codec is spoilt
        model, codec = speech_folders[kind]
        shutil.copytree(codec, folder)
        load = partial(mmaccel.TextToSpeech.from_pretrained, model, codec=folder)
    elif kind == "lm":
        build_lm("llama").save_pretrained(folder)
        load = partial(try_checkpoint, folder, "lm")
    else:
        source = tiny_folder if kind == "words" else built(kind)
        shutil.copytree(source.parent if source.is_file() else source, folder)
        opened = folder / source.name if source.is_file() else folder
        load = partial(mmaccel.TextToImage.from_pretrained, opened, size=SIZES.get(kind))
    spoil(folder)
    with pytest.raises((UnsupportedModelError, OptionError)) as caught:
        load()
    text = str(caught.value)
    assert re.search(said, text), text
    assert "expected" in text and "received" in text and ";" in text and "\n" not in text
    assert len(text) < 700
    if kind == "words":
        capsys.readouterr()
        assert main(["generate", "a red circle", "--model", str(folder), "--out", "o"]) == 1
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and "Traceback" not in line


def test_a_folder_that_asks_for_more_than_the_memory_holds(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outline says how much, before any is taken."""
    monkeypatch.setattr(weight_folders, "available_memory", lambda: 2**30)
    folder = shutil.copytree(tiny_folder, tmp_path / "copy")
    merge(vocab_size=40_000_000)(folder)
    with pytest.raises(UnsupportedModelError, match=r"expected 9\.5 GiB of free .*; dtype bf16"):
        mmaccel.TextToImage.from_pretrained(folder)
