"""`mmaccel doctor` on kernels: one line each, the reason beside it, a bad setting in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmaccel.cli import main
from mmaccel.commands.doctor import check_kernels
from mmaccel.kernels import dispatch
from mmaccel.kernels.dispatch import KERNELS, VARIABLE


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_every_kernel_has_a_line_with_its_twin_and_the_reason() -> None:
    findings = check_kernels()
    assert [finding.what for finding in findings] == [f"kernel {name}" for name in KERNELS]
    for finding in findings:
        assert finding.state == "yes" and finding.detail.startswith("cpu: torch, ")
        assert "GPU" in finding.detail or "triton" in finding.detail


def test_both_kinds_of_device_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        dispatch, "find_obstacle", lambda kind: None if kind == "cuda" else "no GPU under it"
    )
    for finding in check_kernels():
        assert finding.detail == "cpu: torch, no GPU under it; cuda: triton, cuda is there"


@pytest.mark.parametrize(("value", "state"), [("torch", "yes"), ("triton", "no")])
def test_the_variable_is_heard(value: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    for finding in check_kernels():
        assert finding.state == state and f"{VARIABLE}={value}" in finding.detail


def test_a_bad_value_is_one_clear_line(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fixed = ["doctor", "--model", str(tiny_folder), "--out", str(tmp_path)]
    assert main(fixed) == 0
    assert "kernel unmask" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setenv(VARIABLE, "fast")
    (finding,) = check_kernels()
    assert finding.state == "needed" and finding.detail.count(VARIABLE) == 1
    assert main(fixed) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "expected one of auto, torch, triton, received 'fast'; unset it" in said
    assert "Traceback" not in said and "kernel unmask" not in said
