"""`tests/conftest.py` poisons the memory that the package allocates, and closes the network."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import mmaccel.errors
from tests.architecture.source import ROOT

PROGRAM = """
import torch
a = torch.empty(3)
b = torch.empty_like(a)
c = a.new_empty(2)
d = torch.empty(2, dtype=torch.int64)
"""


def run_as(file: Path) -> dict[str, Any]:
    """The variables of PROGRAM, run as if it were the text of `file`."""
    names: dict[str, Any] = {}
    exec(compile(PROGRAM, str(file), "exec"), names)
    return names


@pytest.mark.parametrize("folder", ["samplers", "pipelines"])
def test_memory_of_the_package_is_poisoned(folder: str) -> None:
    own = (ROOT / "mmaccel" / "errors.py").samefile(mmaccel.errors.__file__)
    assert own, "the tests run against another copy of mmaccel than this checkout's"
    made = run_as(ROOT / folder / "no_such_file.py")
    assert all(bool(made[name].isnan().all()) for name in "abc")
    assert made["d"].tolist() == [torch.iinfo(torch.int64).min] * 2


def test_memory_of_others_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "fill_", lambda self, value: filled.append(self) or self)
    run_as(Path(torch.__file__))
    assert filled == []


def test_memory_follows_a_device_context() -> None:
    with torch.device("meta"):
        assert run_as(Path(torch.__file__))["a"].device.type == "meta"


def test_the_network_is_closed() -> None:
    with socket.socket() as connection, pytest.raises(RuntimeError, match="no connection"):
        connection.connect(("127.0.0.1", 9))


@pytest.mark.slow
def test_the_callers_surroundings_have_no_effect() -> None:
    """Tests of what a terminal shows, under a caller that has set everything they could read."""
    given = {
        "COLUMNS": "20", "LINES": "3", "TERM": "dumb", "FORCE_COLOR": "1", "NO_COLOR": "1",
        "LANG": "C", "LC_ALL": "C", "HF_HUB_OFFLINE": "0", "HF_HOME": "/nowhere",
        "MMACCEL_KERNELS": "none such",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    chosen = ["-k", "threads or bad_value", "tests/commands/test_doctor.py"]
    with TemporaryDirectory(prefix="a b") as folder:
        made = subprocess.run(
            [*command, *chosen], cwd=ROOT, env=os.environ | given | {"TMPDIR": folder},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert made.returncode == 0, made.stdout[-3000:]
