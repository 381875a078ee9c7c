"""`mmaccel doctor` and `mmaccel models`: packages, devices, kernels and models."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel.catalog import METHODS
from mmaccel.cli import main
from mmaccel.commands import doctor
from mmaccel.commands.doctor import list_kernels
from mmaccel.kernels.dispatch import KERNELS, VARIABLE
from tests.architecture.source import ROOT
from tests.fixtures.masked_speech import build_masked_voices
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_model import N_TOKENS, break_weights, build_tiny


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_doctor_and_models(tiny_folder: Path, tmp_path: Path, capsys) -> None:
    assert main(["doctor", "--model", str(tiny_folder), "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert torch.__version__ in said and f"{N_TOKENS} tokens an image" in said and "Ready" in said
    assert main(["doctor", "--model", "nothing-there"]) == 1
    said = capsys.readouterr().out
    assert "missing" in said and "'nothing-there'" in said and "Ready" not in said
    assert main(["models"]) == 0
    said = capsys.readouterr().out
    assert "scenes" in said and "relaxed" in said
    listed = {line.split()[0] for line in said.splitlines() if line.strip()}
    assert {name for entries in METHODS.values() for name in entries} <= listed


@pytest.mark.parametrize(
    ("fixed", "own", "says"),
    [
        (None, 2, "measures a pass with 1 to 2 threads"),
        ("2", 2, "OMP_NUM_THREADS=2 fixes"),
        (None, 1, "one thread leaves"),
    ],
)
def test_doctor_explains_threads(fixed: str | None, own: int, says: str, monkeypatch: Any) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if fixed is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", fixed)
    monkeypatch.setattr(torch, "get_num_threads", lambda: own)
    said = doctor._describe_threads()
    assert f"torch takes {own} of {os.cpu_count()} processors; load " in said and says in said


def test_doctor_says_whether_policies_can_be_attached(tmp_path: Path, capsys) -> None:
    for name in ("gpt2", "lfm2"):
        build_lm(name).save_pretrained(tmp_path / name)
    capsys.readouterr()
    assert main(["doctor", "--model", str(tmp_path / "gpt2"), "--out", str(tmp_path)]) == 0
    assert "family causal_lm; attach takes autoregressive, jacobi" in _flat(capsys)
    assert main(["doctor", "--model", str(tmp_path / "lfm2"), "--out", str(tmp_path)]) == 0
    assert "layers of other kinds" in _flat(capsys)
    config = json.loads((tmp_path / "gpt2" / "config.json").read_text())
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config | {"architectures": ["GPT9"]}))
    assert main(["doctor", "--model", str(tmp_path / "gpt2")]) == 1
    assert "has no GPT9" in _flat(capsys)


def test_doctor_tries_models_that_speak_by_a_canvas(tmp_path: Path, capsys) -> None:
    folder = build_masked_voices(tmp_path / "voices")
    assert main(["doctor", "--model", str(folder), "--out", str(tmp_path)]) == 0
    said = _flat(capsys)
    assert "speaks texts" in said and "Ready: mmaccel speak TEXT --model" in said


def _flat(capsys: Any) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_doctor_finds_old_packages_and_broken_weights(tmp_path: Path, monkeypatch) -> None:
    break_weights(build_tiny(tmp_path))
    finding = doctor.try_model(str(tmp_path))
    assert finding.state == "needed" and "expected finite logits" in finding.detail
    monkeypatch.setattr("mmaccel.outputs.machine.package_version", lambda name: "9.1.0")
    states = {f.what: (f.state, f.detail) for f in doctor.list_packages()}
    assert states["torch"] == ("yes", "9.1.0")
    assert states["transformers"][1].startswith("9.1.0; not tested with transformers 9.1.0")
    monkeypatch.setattr("mmaccel.outputs.machine.package_version", lambda name: "5.9.2+cpu")
    old = next(each for each in doctor.list_packages() if each.what == "transformers")
    assert old.state == "needed" and "is too old; pip install 'transformers>=5.17'" in old.detail


def test_doctor_requires_the_versions_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = dict(line.split(">=") for line in project["dependencies"])
    assert {name: wanted[name] for name in doctor._NEEDED} == doctor._NEEDED


def test_the_variable_decides(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert [finding.what for finding in list_kernels()] == [f"kernel {name}" for name in KERNELS]
    for value, state in (("torch", "yes"), ("triton", "no")):
        monkeypatch.setenv(VARIABLE, value)
        for finding in list_kernels():
            assert finding.state == state and f"{VARIABLE}={value}" in finding.detail
    monkeypatch.setenv(VARIABLE, "fast")
    assert main(["doctor", "--model", str(tiny_folder), "--out", str(tmp_path)]) == 1
    assert "expected one of auto, torch, triton, received 'fast'; unset it" in _flat(capsys)
