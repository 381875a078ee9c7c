"""What `tests/conftest.py` promises: poisoned memory for the package alone, and no network."""

from __future__ import annotations

import socket
from pathlib import Path
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


def made_by(file: Path) -> dict[str, Any]:
    """Run a program as if it stood in a file."""
    names: dict[str, Any] = {}
    exec(compile(PROGRAM, str(file), "exec"), names)
    return names


@pytest.mark.parametrize("floor", ["samplers", "pipelines"])
def test_memory_the_package_asks_for_is_poisoned(floor: str) -> None:
    home = ROOT if (ROOT / "mmaccel" / "errors.py").samefile(mmaccel.errors.__file__) else None
    assert home is not None, "the tests run against another copy of mmaccel than this checkout's"
    made = made_by(home / floor / "no_such_file.py")
    assert all(bool(made[name].isnan().all()) for name in "abc")
    assert made["d"].tolist() == [torch.iinfo(torch.int64).min] * 2


def test_memory_others_ask_for_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "fill_", lambda self, value: filled.append(self) or self)
    made_by(Path(torch.__file__))
    assert filled == []


def test_the_network_is_closed() -> None:
    with socket.socket() as connection, pytest.raises(RuntimeError, match="no connection"):
        connection.connect(("127.0.0.1", 9))
