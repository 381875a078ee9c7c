"""Files of pickles: tensors are read, code in them never runs, and memory bounds what is read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel import weight_folders
from mmaccel.commands.doctor import try_model
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.loading.checkpoint import read_weights
from tests.fixtures.lanes import mostly_slow
from tests.fixtures.shared import image_folder, media_folders
from tests.fixtures.tiny_lms import build_lm


class Maker:
    """Pickled, it makes a folder where a reader runs what the pickle says."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def _lm(folder: Path) -> Callable[[], Any]:
    model = build_lm("llama")
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")

    def load() -> None:
        finding = try_model(str(folder))
        if finding.state != "yes":
            raise UnsupportedModelError(finding.detail)

    return load


@pytest.fixture
def door(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[], Any]]:
    """A copy of a file of pickles, and what loads it."""
    name, folder = request.param, tmp_path / "copy"
    if name == "transformers":
        return folder / "pytorch_model.bin", _lm(folder)
    if name == "snac":
        model, codec = media_folders("orpheus")
        shutil.copytree(codec, folder)
        file = folder / "pytorch_model.bin"
        return file, lambda: mmaccel.TextToSpeech.from_pretrained(model, codec=folder)
    shutil.copytree(image_folder("llamagen-c2i").parent, folder)
    file = folder / "c2i_B_64.pt"
    return file, lambda: mmaccel.TextToImage.from_pretrained(file, size=(64, 64))


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    "door", mostly_slow(["llamagen", "snac", "transformers"], "llamagen"), indirect=True
)
def test_a_pickle_is_read_and_its_code_never_runs(
    door: tuple[Path, Callable[[], Any]], is_zip: bool, tmp_path: Path
) -> None:
    """The same file is read with a harmless value, so the malicious one reaches the reader."""
    file, load = door
    marker = tmp_path / "marker"
    content = torch.load(file, weights_only=False)

    def save(value: Any) -> None:
        weights = next((v for v in content.values() if isinstance(v, dict)), content)
        first = next(iter(weights.values()))
        first.note = value  # an attribute of a tensor is pickled with it
        torch.save(content, file, _use_new_zipfile_serialization=is_zip)

    save("harmless")
    load()
    save(Maker(marker))
    with pytest.raises(UnsupportedModelError, match=r"a pickle that calls posix.mkdir"):
        load()
    assert not marker.exists()
    torch.load(file, weights_only=False)  # what reads anything does run it
    assert marker.exists()


def test_a_checkpoint_longer_than_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.zeros(1000)}, tmp_path / "a.pt")
    monkeypatch.setattr(weight_folders, "available_memory", lambda: 4000)
    with pytest.raises(UnsupportedModelError, match="GiB of free memory for .*a.pt, received"):
        read_weights(tmp_path / "a.pt")
    monkeypatch.setattr(weight_folders, "available_memory", lambda: 6000)
    assert read_weights(tmp_path / "a.pt")["a"].shape == (1000,)


def test_a_zip_is_mapped_and_the_file_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    torch.save({"a": torch.zeros(1000)}, file)
    before = file.read_bytes()
    tensor = read_weights(file)["a"]
    tensor.add_(1)
    assert str(file) in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert file.read_bytes() == before


def test_a_model_larger_than_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**40))
    monkeypatch.setattr(weight_folders, "available_memory", lambda: 2**40)
    with pytest.raises(UnsupportedModelError, match="28.0 GiB of free memory on cuda for x, rec"):
        weight_folders.check_memory(28 * 2**30, "x", device="cuda")
    weight_folders.check_memory(28 * 2**30, "x", device="cpu")
