"""The lists of slow tests in tests/slow.py name tests that exist."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.architecture.source import ROOT
from tests.slow import SLOW, SWEEPS, find_slow


@pytest.mark.parametrize("entry", [*SLOW, *SWEEPS])
def test_entry_exists(entry: str) -> None:
    path, _, function = entry.partition("::")
    assert (ROOT / path).exists()
    assert not function or f"def {function}(" in (ROOT / path).read_text(encoding="utf-8")


def test_a_sweep_keeps_every_nth_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.slow.SWEEPS", {"tests/x.py": 3})
    monkeypatch.setattr("tests.slow.SLOW", ("tests/y", "tests/z.py::test_a"))
    ids = [f"tests/x.py::test_a[{k}]" for k in range(5)]
    ids += ["tests/x.py::test_b", "tests/y/t.py::test_a", "tests/z.py::test_a[0]"]
    ids += ["tests/z.py::test_ab", "tests/y.py::test_a"]
    items = [SimpleNamespace(nodeid=name) for name in ids]
    assert [item.nodeid for item in find_slow(items)] == [*ids[1:3], ids[4], *ids[6:8]]
