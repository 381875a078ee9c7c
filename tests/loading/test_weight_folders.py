"""Folders of weights of ours are read by their schema, and refused where they are spoilt.

A codec stands for all, which `open_folder` reads; of the others test_spoilt_folders.py has a case.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmaccel import weight_folders
from mmaccel.errors import MMAccelError, OptionError, UnsupportedModelError
from mmaccel.tokenizers_vq.speech_codec import FOLDER, load_codec, save_codec
from tests.fixtures.voices import build_codec


def _resize(file: Path, name: str, value: Any) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    content.get("config", content)[name] = value
    file.write_text(json.dumps(content), encoding="utf-8")


def _edit(file: Path, change: Callable[[dict[str, Any], str], Any]) -> None:
    """Change the tensors of a file, or the last one of floating-point numbers."""
    tensors = load_file(file)
    change(tensors, [name for name, t in tensors.items() if t.is_floating_point()][-1])
    save_file(tensors, file)


def _no_number(tensors: dict[str, Any], name: str) -> None:
    tensors[name].view(-1)[0] = float("nan")


def _split(weights: Path) -> list[Path]:
    """Two files and an index in place of one."""
    tensors, parts = load_file(weights), [weights.with_name(f"part{n}") for n in range(2)]
    for n, part in enumerate(parts):
        save_file({name: tensors[name] for name in list(tensors)[n::2]}, part)
    names = {name: parts[n % 2].name for n, name in enumerate(tensors)}
    index = weights.with_name(f"{weights.name}.index.json")
    index.write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    weights.unlink()
    return parts


# config, weights, name of a size -> the file is spoilt; class and words of the error
DAMAGES: dict[str, tuple[Callable[[Path, Path, str], Any], type[MMAccelError], str]] = {
    "no weights": (lambda config, weights, size: weights.unlink(), OptionError, "received no "),
    "no config": (lambda config, weights, size: config.unlink(), OptionError, "received no "),
    "no JSON": (
        lambda config, weights, size: config.write_text("{"),
        UnsupportedModelError,
        "a JSON object",
    ),
    "a wrong size": (
        lambda config, weights, size: _resize(config, size, 264),
        UnsupportedModelError,
        "264.*asks, received",
    ),
    "a size out of range": (
        lambda config, weights, size: _resize(config, size, 10**9),
        UnsupportedModelError,
        "received 1000000000",
    ),
    "a cut file": (
        lambda config, weights, size: os.truncate(weights, 200),
        UnsupportedModelError,
        "safetensors cannot read",
    ),
    "a file less": (
        lambda config, weights, size: _split(weights)[1].unlink(),
        UnsupportedModelError,
        "part1, received what safetensors cannot read",
    ),
    "a tensor less": (
        lambda config, weights, size: _edit(weights, lambda w, name: w.pop(name)),
        UnsupportedModelError,
        "asks, received none in",
    ),
    "a tensor more": (
        lambda config, weights, size: _edit(weights, lambda w, _: w.update(x=torch.ones(2))),
        UnsupportedModelError,
        r"expected 'x' none, as .* asks, received \[2\]",
    ),
    "NaN": (
        lambda config, weights, size: _edit(weights, _no_number),
        UnsupportedModelError,
        "received NaN or infinity",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_folder_is_refused_where_it_is_spoilt(name: str, tmp_path: Path) -> None:
    spoil, error, said = DAMAGES[name]
    save_codec(build_codec(), tmp_path)
    assert isinstance(load_codec(tmp_path), torch.nn.Module)
    spoil(tmp_path / FOLDER.config, tmp_path / FOLDER.weights, "decoder_width")
    with pytest.raises(error, match=said) as caught:
        load_codec(tmp_path)
    text = str(caught.value)
    assert text.startswith(f"{FOLDER.option}: ") and "expected " in text and "; " in text
    assert "\n" not in text


def test_a_folder_that_the_memory_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_codec(build_codec(), tmp_path)
    monkeypatch.setattr(weight_folders, "available_memory", lambda: 100)
    with pytest.raises(UnsupportedModelError, match=r"0\.0 GiB of free memory for .*; free memory"):
        load_codec(tmp_path)


def test_several_files_with_an_index_are_read_as_one(tmp_path: Path) -> None:
    save_codec(build_codec(), tmp_path)
    whole = load_codec(tmp_path).state_dict()
    _split(tmp_path / FOLDER.weights)
    parts = load_codec(tmp_path).state_dict()
    assert parts.keys() == whole.keys()
    assert all(parts[name].equal(value) for name, value in whole.items())
