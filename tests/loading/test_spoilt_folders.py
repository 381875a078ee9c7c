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
from safetensors.torch import load_file, save_file

import mmaccel
from mmaccel import weight_folders
from mmaccel.cli import main
from mmaccel.commands.doctor import try_checkpoint
from mmaccel.errors import OptionError, UnsupportedModelError
from tests.exactness import bitwise_runs
from tests.fixtures.checkpoints import SIZES
from tests.fixtures.coarse import StateLanguage, strong_coarse
from tests.fixtures.heads import build_target, make_head, save_draft
from tests.fixtures.media import MEDIA, open_media
from tests.fixtures.mtp import open_mtp_model, save_mtp
from tests.fixtures.shared import image_folder, media_folders
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import make_prompt
from tests.layers.test_kvzap_scorer import make_networks
from tests.layers.test_kvzap_scorer import write as write_scorer

Spoil = Callable[[Path], Any]
WEIGHTS = "model.safetensors"
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
C2I = "c2i_B_64.pt"
DRAFTS = ("eagle", "dflash", "mtp", "coarse", "scorer")


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


def drop(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def lose(pattern: str, file: str = WEIGHTS) -> Spoil:
    """Delete the tensors whose names contain a text."""

    def spoil(folder: Path) -> None:
        weights = load_file(folder / file)
        kept = {name: value for name, value in weights.items() if pattern not in name}
        save_file(kept, folder / file, metadata={"format": "pt"})

    return spoil


def template(folder: Path) -> None:
    """A chat template that ends a message early."""
    write("chat_template.jinja", "{% for m in messages %}{{ m.content[:5] }}{% endfor %}")(folder)


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def other_coarse(folder: Path) -> None:
    strong_coarse(torch.eye(5) * 2, folder)


# checkpoint, how it is spoilt, what is said
CASES: tuple[tuple[str, Spoil, str], ...] = (
    ("words", write("config.json", ""), "a JSON object in .*config.json"),
    ("words", write("config.json", DEEP), "brackets within brackets"),
    ("words", merge(model_type="none"), "model type `none`"),
    ("words", merge(num_hidden_layers=1), "surplus, such as"),
    ("words", merge("words.json", words=7), "words in .* expected a list"),
    ("words", merge("words.json", words=["a"], max_words=3), "vocabulary of 34 ids.*received 41"),
    ("words", drop("words.json"), "expected words.json, .*received llama"),
    ("lm", drop(WEIGHTS), f"no file named {WEIGHTS}"),
    ("lm", shard, "two.safetensors"),
    ("emu3", write("tokenizer.json", "{"), "none that transformers can read"),
    ("emu3", lose("text_model.model.norm.weight"), "1 missing, .*norm"),
    ("janus", drop("chat_template.jinja"), "expected a chat template"),
    ("chameleon", drop("vqgan.ckpt"), "decoder: expected weights of VQGAN's"),
    ("llamagen-c2i", flatten, "2 sides, received"),
    ("llasa", template, "continue_final_message"),
    ("llasa", drop("chat_template.jinja"), "chat_template is not set"),
    ("cosmos", merge(video_latent_shape=[3, 2]), "video_latent_shape"),
    ("cosmos", merge(rope_theta="500000"), "rope_theta in .*received '500000'"),
    ("codec of orpheus", merge(decoder_dim=32), "codec: .* snac refuses .*size mismatch"),
    ("codec of llasa", truncate(WEIGHTS), "codec: .* that transformers refuses"),
    ("words", lose("decoder", "tokenizer.safetensors"), "asks, received none in"),
    # drafts
    ("eagle", pickled, "save its pickled weights as safetensors"),
    ("dflash", lose("mlp"), "asks, received none in"),
    ("coarse", lose("out", "coarse.safetensors"), "asks, received none in"),
    ("eagle", merge(hidden_size=48), "of width 32.*of width 48"),
    ("eagle", merge(rope_scaling={"rope_type": "yarn"}), "without rope_scaling.*yarn"),
    ("dflash", merge(selector_rank=256), "DFlash 2 is not read.*selector_rank"),
    ("mtp", lose("mtp"), "weights of multi-token prediction.*copy the folder again"),
    ("coarse", merge("coarse.json", config={}), "coarse.json"),
    ("coarse", other_coarse, "received one of another model"),
    ("scorer", lose("layers.0"), "layers.0.weight"),
)  # fmt: skip


def open_drafts(kind: str, folder: Path) -> Callable[[], Any]:
    """Write a tiny head, and how a run with it begins."""
    if kind == "coarse":
        source = strong_coarse(torch.eye(5), folder)
        return lambda: bitwise_runs.run(mmaccel.Jacobi(6, source), {}, model=StateLanguage(5, 6))
    if kind == "scorer":
        write_scorer(folder, make_networks("mlp"))
        return partial(mmaccel.KVzap, scorer=str(folder))
    model = build_lm("llama")
    if kind == "dflash":
        save_draft("authors", folder)
        model, source = build_target(), mmaccel.DFlash(str(folder))
    elif kind == "mtp":
        save_mtp(folder)
        return lambda: generate(open_mtp_model(folder), "mtp")
    else:
        make_head(model, folder, third=True)
        source = mmaccel.Eagle(str(folder))
    return lambda: generate(model, source)


def generate(model: Any, drafts: Any) -> None:
    """A run, which must end before any pass of the model."""
    model.register_forward_pre_hook(lambda *_: pytest.fail("a pass was made"))
    mmaccel.Jacobi(4, drafts).sample(
        mmaccel.CausalLMWindow(model), make_prompt([[5, 6]]), 6,
        params=mmaccel.SamplingParams(), noise=mmaccel.Noise.from_seed(0, 1),
    )  # fmt: skip


@pytest.fixture
def opens(
    tmp_path: Path,
) -> Callable[[str], tuple[Path, Callable[[], Any]]]:
    """A copy of a checkpoint that may be changed, and how it is opened."""

    def copy(kind: str) -> tuple[Path, Callable[[], Any]]:
        folder = tmp_path / "copy"
        if kind == "lm":
            build_lm("llama").save_pretrained(folder)
            return folder, partial(try_checkpoint, folder, "lm")
        family = kind.removeprefix("codec of ")
        if family in MEDIA:
            model, codec = media_folders(family)
            shutil.copytree(model if kind == family else codec, folder)
            pair = (folder, codec) if kind == family else (model, folder)
            return folder, partial(open_media, family, pair)
        if kind in DRAFTS:
            folder.mkdir()
            return folder, open_drafts(kind, folder)
        source = image_folder(kind)
        shutil.copytree(source.parent if source.is_file() else source, folder)
        opened = folder / source.name if source.is_file() else folder
        options = {"size": SIZES.get(kind)}
        return folder, partial(mmaccel.TextToImage.from_pretrained, opened, **options)

    return copy


@pytest.mark.parametrize(("kind", "spoil", "said"), CASES)
def test_a_spoilt_folder_is_refused_in_one_line(
    kind: str, spoil: Spoil, said: str, opens: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, load = opens(kind)
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
