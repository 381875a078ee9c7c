"""Every cell of the table of docs/compatibility.md is what a run gives, for every method."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.report import fill_tables
from tests.architecture.source import ROOT
from tests.fixtures.lanes import every
from tests.fixtures.tiny_lms import build_lm
from tests.matrix import layer_support
from tests.matrix.examples import Target, make
from tests.matrix.layer_support import CHECKS, EVERY, measure

REPORT = json.loads((ROOT / "benchmarks/results/layer-support.json").read_text(encoding="utf-8"))
ROWS = {(row["slot"], row["name"]): row for row in REPORT["layer_support"]}


def test_every_method_has_a_row() -> None:
    assert list(ROWS) == EVERY
    text = fill_tables("<!-- table: layer-support -->\n<!-- end -->", {"r": REPORT, "other": {}})
    assert all(f"[`{row['method']}`]" in text for row in ROWS.values())


@pytest.mark.parametrize(("slot", "name"), every(4, EVERY))
def test_cells_are_what_a_run_gives(slot: str, name: str) -> None:
    assert measure(slot, name) == ROWS[slot, name]


def test_cells_see_what_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_lm("llama")
    given: dict[str, Any] = {"kv_cache": make("kv_cache", "tova", Target(model))}
    run = layer_support.generate

    def spoilt(*args: Any, **options: Any) -> Any:
        made, stats = run(*args, **options)
        calls.append(made)
        return made + len(calls), stats

    calls: list[Any] = []
    monkeypatch.setattr(layer_support, "generate", spoilt)
    assert [CHECKS[column](model, given) for column in ("window", "batch")] == ["other tokens"] * 2
    monkeypatch.setattr(layer_support, "generate", run)
    given = {"kv_cache": make("kv_cache", "tova", Target(model), budget=64)}  # keeps everything
    assert [CHECKS[column](model, given) for column in ("window", "memory")] == ["no", "no"]
