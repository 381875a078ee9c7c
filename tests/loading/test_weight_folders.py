"""Folders of weights of ours: every kind is read by its schema, and refused where it is spoilt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmaccel import weight_folders
from mmaccel.errors import MMAccelError, OptionError, UnsupportedModelError
from mmaccel.samplers.drafting import coarse_model
from mmaccel.samplers.drafting.heads import eagle_model
from mmaccel.samplers.drafting.parallel import dflash_model
from mmaccel.tokenizers_vq import autoencoder, speech_codec
from mmaccel.weight_folders import Schema
from tests.fixtures.coarse import strong_coarse
from tests.fixtures.heads import make_head, save_draft
from tests.fixtures.spoiled import cut
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_model import build_tiny
from tests.fixtures.voices import build_codec

OUTPUT = torch.eye(5)


def _matrices() -> dict[str, Any]:
    model = build_lm("llama")
    embedding = model.get_input_embeddings().weight
    return {"embedding": embedding, "output": model.lm_head.weight, "n_layers": 3}


# schema, what writes a folder, what reads it, a size of its configuration
KINDS: dict[str, tuple[Schema[Any], Callable[[Path], Any], Callable[[Path], Any], str]] = {
    "eagle": (
        eagle_model.FOLDER,
        lambda folder: make_head(build_lm("llama"), folder, third=True),
        lambda folder: eagle_model.load_eagle(folder, **_matrices()),
        "intermediate_size",
    ),
    "dflash": (
        dflash_model.FOLDER,
        lambda folder: save_draft("authors", folder),
        lambda folder: dflash_model.load_dflash(folder, **_matrices()),
        "intermediate_size",
    ),
    "coarse": (
        coarse_model.FOLDER,
        lambda folder: strong_coarse(OUTPUT, folder),
        lambda folder: coarse_model.load_coarse(folder, OUTPUT),
        "width",
    ),
    "tokenizer": (autoencoder.FOLDER, build_tiny, autoencoder.load_tokenizer, "decoder_width"),
    "codec": (
        speech_codec.FOLDER,
        lambda folder: speech_codec.save_codec(build_codec(), folder),
        speech_codec.load_codec,
        "decoder_width",
    ),
}


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
        lambda config, weights, size: cut(weights.name)(weights.parent),
        UnsupportedModelError,
        "safetensors cannot read",
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_read_and_refused_where_it_is_spoilt(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema, write, load, size = KINDS[kind]
    for number, (name, (spoil, error, said)) in enumerate(DAMAGES.items()):
        folder = tmp_path / str(number)
        write(folder)
        assert isinstance(load(folder), torch.nn.Module)
        spoil(folder / schema.config, folder / schema.weights, size)
        with pytest.raises(error, match=said) as caught:
            load(folder)
        assert str(caught.value).startswith(f"{schema.option}: "), (name, caught.value)
        assert "expected " in str(caught.value) and "; " in str(caught.value)
        assert "\n" not in str(caught.value)
    write(tmp_path / "whole")
    monkeypatch.setattr(weight_folders, "available_memory", lambda: 100)
    with pytest.raises(UnsupportedModelError, match=r"0\.0 GiB of free memory for .*; free memory"):
        load(tmp_path / "whole")


def test_pickled_weights_of_a_head_are_to_be_converted(tmp_path: Path) -> None:
    make_head(build_lm("llama"), tmp_path, third=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(OptionError, match="save its pickled weights as safetensors"):
        eagle_model.load_eagle(tmp_path, **_matrices())
