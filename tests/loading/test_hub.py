"""Downloads from the hub: which files, and five refusals that say what helps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig
from mmaccel.pipelines.hosts.loading.hub import choose_files
from tests.architecture.source import ROOT
from tests.fixtures.fake_hub import serve_hub

SHARDED = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
ASK = """
import json, sys
from mmaccel.errors import MMAccelError
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig
from mmaccel.pipelines.hosts.loading.hub import download
for name, options in json.loads(sys.argv[1]):
    try:
        folder = download(name, LoadConfig(**options))
        print(json.dumps(["", sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*")
                                     if p.is_file())]))
    except MMAccelError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


def ask(address: str, home: Path, *calls: tuple[str, dict]) -> list[tuple[str, object]]:
    """Downloads in a process of their own, because the hub's address is read at import."""
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(home)}
    environment |= {"HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(calls)],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return [tuple(json.loads(line)) for line in ran.stdout.splitlines()]


@pytest.fixture
def repositories(tmp_path: Path) -> dict[str, Path]:
    """A model, a look-alike, and a model that is too large."""
    found = {name: tmp_path / name for name in ("own/tiny", "own/twin", "own/janus", "own/large")}
    for folder in found.values():
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        for file in ("model.safetensors", "pytorch_model.bin", "README.md", "picture.png"):
            (folder / file).write_bytes(b"x" * 100)
    served = {"model_type": "emu3", "vocab_size": 184622}  # transformers' layout: no look-alike
    for name in ("own/tiny", "own/twin"):
        (found[name] / "config.json").write_text(json.dumps(served))
    (found["own/janus"] / "config.json").write_text('{"model_type": "multi_modality"}')
    found["own/lora"] = tmp_path / "own/lora"
    found["own/lora"].mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "own/base"}
    (found["own/lora"] / "adapter_config.json").write_text(json.dumps(adapter))
    (found["own/lora"] / "adapter_model.safetensors").write_bytes(b"x")
    (found["own/large"] / "huge.safetensors").write_bytes(b"x")
    return found


@pytest.mark.slow  # two processes
def test_a_download_and_every_refusal(repositories: dict[str, Path], tmp_path: Path) -> None:
    """The last model is downloaded to a cache of the caller's own."""
    home, elsewhere = tmp_path / "home", {"cache_dir": str(tmp_path / "own cache")}
    with serve_hub(repositories, {"huge.safetensors": 2**60}) as (address, asked):
        tiny, janus, large, gated, missing, revision, lora, other = ask(
            address, home,
            ("own/tiny", {}), ("own/janus", {}), ("own/large", {}), ("own/gated", {}),
            ("own/other", {}), ("own/tiny", {"revision": "v9"}), ("own/lora", {}),
            ("own/twin", elsewhere),
        )  # fmt: skip
    assert tiny == other == ("", ["config.json", "model.safetensors"])
    assert (tmp_path / "own cache" / "models--own--twin").is_dir()
    assert lora[0] == "UnsupportedModelError" and "an adapter of peft; load own/base" in lora[1]
    assert "adapter_model.safetensors" not in asked and "model.load_adapter" in lora[1]
    assert "huge.safetensors" not in asked and asked.count("model.safetensors") <= 4  # HEAD, GET
    assert janus[0] == "UnsupportedModelError" and "deepseek-community/Janus-Pro-7B" in janus[1]
    assert "GiB on the disk of" in large[1] and "set HF_HOME" in large[1]
    assert "gated; accept its licence at https://huggingface.co/own/gated" in gated[1]
    assert "not there or private" in missing[1] and "models?search=other" in missing[1]
    assert "revision: expected a branch, tag or commit of own/tiny, received 'v9'" in revision[1]
    assert "leave it out for the main branch" in revision[1]

    gone = "http://127.0.0.1:9"  # nobody listens
    near = {"local_files_only": True}
    cached, offline, local, none, there, not_there = ask(
        gone, home,
        ("own/tiny", {}), ("own/new", {}), ("own/tiny", near), ("own/new", near),
        ("own/twin", elsewhere | near), ("own/twin", near),
    )  # fmt: skip
    assert cached == local == there == tiny and "no copy there" in not_there[1]
    assert "the hub cannot be reached" in offline[1] and "connect to the network" in offline[1]
    assert "local_files_only=True and no copy there" in none[1]


@pytest.mark.parametrize(
    ("names", "variant", "kept"),
    [
        ([*SHARDED, "pytorch_model.bin", "tf_model.h5", "README.md"], None, SHARDED),
        (["a.fp16.safetensors", "a.safetensors"], None, ["a.safetensors"]),
        (["a.fp16.safetensors", "a.safetensors"], "fp16", ["a.fp16.safetensors"]),
        (["a.safetensors"], "fp16", ["a.safetensors"]),
        (["a.fp16.safetensors"], None, ["a.fp16.safetensors"]),
        (["vq.pt", "t2i.pt", "x/config.json"], None, ["vq.pt", "t2i.pt", "x/config.json"]),
        (["unet/a.safetensors", "vae/a.bin"], None, ["unet/a.safetensors", "vae/a.bin"]),
        (
            ["m.safetensors.index.fp16.json", "m.fp16-00001-of-00001.safetensors", "m.safetensors"],
            "fp16",
            ["m.safetensors.index.fp16.json", "m.fp16-00001-of-00001.safetensors"],
        ),
    ],
)
def test_files_that_are_read(names: list[str], variant: str | None, kept: list[str]) -> None:
    assert choose_files(names, variant) == kept


def test_a_bad_token_is_not_shown() -> None:
    with pytest.raises(OptionError) as caught:
        LoadConfig(token=123456)  # type: ignore[arg-type]
    assert "123456" not in str(caught.value)
