"""Figures in the documents are measured: tables come from benchmarks/results, cards from JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import fill_tables, read_reports
from mmaccel.errors import OptionError
from scripts.training.cards import (
    write_features_card,
    write_grammar_card,
    write_masked_card,
    write_scenes_card,
    write_vqa_card,
)
from tests.architecture.source import ROOT

WEIGHTS = sorted((ROOT / "mmaccel" / "demo" / "weights").iterdir())
CARDS = {
    "scenes": write_scenes_card,
    "scenes-features": write_features_card,
    "scenes-masked": write_masked_card,
    "grammar-masked": write_grammar_card,
    "scenes-vqa": write_vqa_card,
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert fill_tables(text, read_reports(ROOT / "benchmarks" / "results")) == text


def test_a_changed_figure_changes_the_table() -> None:
    reports = read_reports(ROOT / "benchmarks" / "results")
    rows = (row for report in reports.values() for row in report.get("rows", ()))
    row = next(row for row in rows if row["policy"] == "gsd")
    row["passes"] = 123.4
    marked = "<!-- table: grouped-speculative -->\nold\n<!-- end -->"
    filled = fill_tables(marked, reports)
    assert "| 123.4 |" in filled and "old" not in filled


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(OptionError, match="nonsense"):
        fill_tables("<!-- table: nonsense -->\n<!-- end -->", {})


def test_routes_are_compared_in_a_table() -> None:
    row = {"batch_size": 8, "guidance": 2.0, "images": 3, "passes": 64.0, "tokens_per_pass": 4.0}
    rows = [
        row | dict(route="library", policy=None, seconds=2.0, speed_up=1.0, of_direct=None),
        row | dict(route="transformers", policy="J()", seconds=1.0, speed_up=2.0, of_direct=1.25),
    ]
    machine = {"name": "CPU", "threads": 2, "versions": {"torch": "2", "transformers": "5"}}
    report = {"model": "scenes", "dtype": "float32", "temperature": 1.0, "machine": machine}
    report |= {"command": "python benchmarks/routes.py", "routes": rows}
    marked = "<!-- table: routes -->\nold\n<!-- end -->"
    filled = fill_tables(marked, {"a": report, "b": {"rows": []}})
    assert "old" not in filled and "Batch 8, guidance 2, 3 captions:" in filled
    assert "| transformers alone | model |  | 64.0 | 4.00 | 2.000 | 1.00× |  |" in filled
    assert "| attached | model | `J()` | 64.0 | 4.00 | 1.000 | 2.00× | 1.25× |" in filled
    assert "Not yet measured." in fill_tables(marked, {})


def test_canvas_policies_are_compared_in_a_table() -> None:
    row = {"model": "m", "policy": "sure", "exactness": "relaxed", "rows": 4, "passes": 2.5}
    row |= {"tokens_per_pass": 3.25, "positions": 40.6, "nats": 0.125, "same": 3}
    row |= {"quality": {"right": 0.75}}
    machine = {"versions": {"torch": "2"}}
    report = {"canvas": [row], "machine": machine, "seed": 0, "command": "mmaccel bench"}
    filled = fill_tables("<!-- table: canvas -->\nold\n<!-- end -->", {"a": report})
    assert "| sure | relaxed | 2.50 | 3.25 | 41 | 0.125 | 3 of 4 | 0.750 |" in filled
    assert "| same tokens | right |" in filled and "old" not in filled


@pytest.mark.parametrize("folder", WEIGHTS, ids=lambda folder: folder.name)
def test_model_cards_are_written_from_their_figures(folder: Path) -> None:
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    assert (folder / "README.md").read_text(encoding="utf-8") == CARDS[card["name"]](card)
    assert card["name"] == folder.name


def test_reducers_are_compared_in_a_table() -> None:
    share = {"right": 0.75, "low": 0.5, "high": 0.875, "questions": 8}
    whole = {"method": "all tokens", "keep": 1.0, "accuracy": {"all": share, "a": share, "b": None}}
    whole |= {"to_all": None, "to_random": None, "informative": None, "visual_tokens": 520.0}
    whole |= {"layer_tokens": 520.0, "flops": 3.5e9, "prefill_seconds": 0.1, "seconds": 0.2}
    less = {"difference": -0.1, "low": -0.2, "high": 0.05}
    fast = whole | {"method": "FastV", "keep": 0.22, "to_all": less, "informative": share}
    report = {"sides": [whole, fast], "model": "m", "questions": 8, "kind_names": ["a", "b"]}
    report |= {"batch": 4, "dtype": "float32", "command": "mmaccel evaluate visual-tokens"}
    report |= {"machine": {"name": "CPU", "threads": 2, "versions": {"torch": "2"}}}
    marked = "<!-- table: visual-tokens -->\nold\n<!-- end -->"
    filled = fill_tables(marked, {"a": report, "b": {"visual_tokens": 3}})
    costs = "| 520 (520) | 3.5 | 100.0 | 200.0 |"
    assert f"| all tokens | 1 | 75.0 (50.0…87.5) | - | - | - {costs}" in filled
    fastv = "| FastV | 0.22 | 75.0 (50.0…87.5) | -10.0 (-20.0…+5.0) | - | 75 (of 8)"
    assert f"{fastv} {costs}" in filled and "| FastV | 0.22 | 75 | - |" in filled
    assert "old" not in filled and "Not yet measured." in fill_tables(marked, {})


def test_the_draft_study_is_drawn_from_its_report() -> None:
    study = {
        "command": "python benchmarks/draft_study.py",
        "captions": ["a red circle"],
        "grid": [16, 16],
        "tokens_per_pass": [
            {"drafts": name, "window": window, "tokens_per_pass": window / divisor}
            for name, divisor in (("left", 4), ("random", 8))
            for window in (8, 16)
        ],
        "agreement": {"8": [0.0] * 7, "16": [k / 20 for k in range(15)]},
    }
    filled = fill_tables("<!-- table: draft-study -->\nold\n<!-- end -->", {"study": study})
    assert "old" not in filled
    assert "| drafts | window 8 | window 16 |" in filled
    assert "| left | 2.00 | 4.00 |\n| random | 1.00 | 2.00 |" in filled
    assert "| slots ahead | 0 | 1 | 2 | 4 | 8 | 12 |" in filled
    assert "| right | 0 % | 5 % | 10 % | 20 % | 40 % | 60 % |" in filled
    nothing = fill_tables("<!-- table: draft-study -->\nold\n<!-- end -->", {})
    assert "Not yet measured." in nothing


def test_the_coarse_study_is_drawn_from_its_report() -> None:
    row = {"guidance": 1.0, "half_width": None, "identical": 2, "images": 2, "sweep_share": 0.05}
    rows = [
        row | dict(window=8, drafts="neighbour", candidates=None, tokens_per_pass=2, seconds=3.0),
        row | dict(window=8, drafts="runs/c1", candidates=16, tokens_per_pass=4, seconds=1.5),
        row | dict(window=8, drafts="runs/c1", candidates=4, tokens_per_pass=3, seconds=1.0),
        row | dict(window=8, drafts="runs/c2", candidates=16, tokens_per_pass=5, seconds=1.0),
    ]
    losses = dict(seen=3.0, stale=3.5, model_seen=2.5, unseen=4.0, model_unseen=2.75)
    card = {"parameters": 1_300_000, "bytes": 2_600_000, "minutes": 9.5, "cross_entropy": losses}
    point = {"minutes": 5, "cross_entropy": losses}
    point |= {"tokens_per_pass": [{"coarse": 4.5, "guidance": 1.0, "window": 32}]}
    machine = {"name": "CPU", "threads": 2, "versions": {"torch": "2"}}
    study = {"command": "python s.py", "model": "scenes", "captions": ["a"], "temperature": 1.0}
    study |= {"machine": machine, "coarse_study": rows}
    study |= {"coarse": {"runs/c1": card, "runs/c2": card | {"curve": [point]}}}
    filled = fill_tables("<!-- table: coarse-study -->\nold\n<!-- end -->", {"s": study, "b": {}})
    assert "old" not in filled
    assert "| 1 | 8 | c1 | 4.00 | 1.500 | 2.00× | 2 of 2 | 5.0 % |" in filled
    assert (
        "| c2 | 1 300 000 | 2.60 | 9.5 | 3.00 (2.50; uncorrected 3.50) | 4.00 (2.75) | 5.00 |"
        in filled
    )
    assert "| c1 | 1 300 000 | 2.60 | 9.5 |" in filled and "4.00 (2.75) | 4.00 |" in filled
    assert "| 1 | 8 | 4 | 3.00 | 5.0 % |\n| 1 | 8 | 16 | 4.00 | 5.0 % |" in filled
    assert "| c2 | 5 | 3.00 (2.50; uncorrected 3.50) | 4.00 (2.75) | 4.50 (guidance 1," in filled
    nothing = fill_tables("<!-- table: coarse-study -->\nold\n<!-- end -->", {})
    assert "Not yet measured." in nothing


def test_rows_of_coarse_drafts_say_so() -> None:
    reports = read_reports(ROOT / "benchmarks" / "results")
    report = reports["scenes-cpu-adaptive"]
    rows = [row for row in report["rows"] if row["policy"] == "jacobi" and row["window"] == 32]
    rows[0]["drafts"], rows[1]["drafts"] = "neighbour", "runs/c1"
    filled = fill_tables("<!-- table: jacobi -->\n<!-- end -->", {"a": report})
    assert "| jacobi, window 32 |" in filled and "| jacobi, window 32, c1 drafts |" in filled
