"""Figures in the documents are measured: tables come from benchmarks/results, cards from JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import fill_tables, read_reports
from mmaccel.errors import OptionError
from scripts.training.card import write_card
from tests.architecture.source import ROOT

KEPT = (ROOT / "mmaccel" / "demo" / "weights", ROOT / "scripts" / "training" / "weights")
WEIGHTS = sorted(card.parent for home in KEPT for card in home.glob("*/card.json"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert fill_tables(text, read_reports(ROOT / "benchmarks" / "results")) == text


def test_a_changed_figure_changes_the_table() -> None:
    reports = read_reports(ROOT / "benchmarks" / "results")
    rows = (row for report in reports.values() for row in report.get("rows", ()))
    row = next(row for row in rows if row.get("policy") == "gsd" and row["guidance"] == 2)
    row["seconds"] = 123.4
    marked = "<!-- table: window -->\nold\n<!-- end -->"
    filled = fill_tables(marked, reports)
    assert "| 123.400 |" in filled and "old" not in filled


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(OptionError, match="nonsense"):
        fill_tables("<!-- table: nonsense -->\n<!-- end -->", {})


@pytest.mark.parametrize("folder", WEIGHTS, ids=lambda folder: folder.name)
def test_model_cards_are_written_from_their_figures(folder: Path) -> None:
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    assert (folder / "README.md").read_text(encoding="utf-8") == write_card(card)
    assert card["name"] == folder.name


def test_rows_of_coarse_drafts_say_so() -> None:
    reports = read_reports(ROOT / "benchmarks" / "results")
    report = reports["scenes-cpu-adaptive"]
    rows = {row["window"]: row for row in report["rows"] if row["guidance"] == 2}
    rows[16]["drafts"], rows[32]["drafts"] = "neighbour", "runs/c1"
    filled = fill_tables("<!-- table: window -->\n<!-- end -->", {"a": report})
    assert "| jacobi, window 16 |" in filled and "| jacobi, window 32, c1 drafts |" in filled
