"""Which items failed when a model raises: those its error names, or those in progress."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mmaccel.batch.job import ItemsFailed
from mmaccel.batch.manifest import Record
from mmaccel.batch.prompts import Item, Row, make_items
from mmaccel.batch.worker import Setup, Worker
from mmaccel.cli import main
from mmaccel.errors import NumericsError
from tests.fixtures.tiny_model import CAPTIONS, N_CODES, WORDS, build_tiny

N_ITEMS = 6


@pytest.fixture(scope="module")
def opened(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    return Worker(Setup(str(tiny_folder), tmp_path_factory.mktemp("out"), rows=3))


def fail_after(worker: Worker, patch: pytest.MonkeyPatch, n: int, error: Exception) -> None:
    """Let every run of the model raise after n images."""
    run_all = worker._generator.run_all

    def broken(requests: Sequence[Any], settings: Any, on_finish: Any, rows: int) -> None:
        if n:
            run_all(requests[:n], settings, on_finish, rows)
        raise error

    patch.setattr(worker._generator, "run_all", broken)


def failed_of(
    worker: Worker, items: list[Item], rows: int | None = None
) -> tuple[ItemsFailed, list[Item]]:
    """The error, and the finished items in their order."""
    made: set[tuple[str, int]] = set()

    def on_finish(record: Record) -> None:
        made.add((record["id"], record["k"]))

    worker.check(items)
    with pytest.raises(ItemsFailed) as caught:
        worker.run_all(items, on_finish, rows)
    return caught.value, [item for item in items if item.key in made]


@pytest.mark.parametrize("rows", [(0,), (2,), (1, 2), (4,), (0, 1, 2)])
def test_items_that_the_error_names_failed(
    opened: Worker, monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...]
) -> None:
    items, error = make_items([Row("a", CAPTIONS[0], n=N_ITEMS)], 3), NumericsError("no", rows)
    fail_after(opened, monkeypatch, 0, error)
    failed, made = failed_of(opened, items)
    assert failed.items == [items[k] for k in rows] and made == []
    assert failed.__cause__ is error and str(failed) == "NumericsError: no"


def test_rows_are_counted_from_the_first_item_and_not_from_the_first_unfinished(
    opened: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = make_items([Row("a", CAPTIONS[0], n=N_ITEMS)], 3)
    fail_after(opened, monkeypatch, 2, NumericsError("no", (3,)))
    failed, made = failed_of(opened, items)
    assert made == items[:2] and failed.items == [items[3]]


def test_rows_are_those_of_the_items_that_are_decoded_together(
    opened: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two policies in alternation, an error of the first can name every other item only."""
    rows = [Row(f"r{k}", CAPTIONS[0], policy=("jacobi", "mc-sjd")[k % 2]) for k in range(N_ITEMS)]
    items = make_items(rows, 3)
    fail_after(opened, monkeypatch, 0, NumericsError("no", (1, 2)))
    failed, _ = failed_of(opened, items)
    assert failed.items == [items[2], items[4]]


@pytest.mark.parametrize("error", [RuntimeError("no"), NumericsError("no")])
@pytest.mark.parametrize(("n", "rows", "wanted"), [(0, None, [0, 1, 2]), (2, None, [2, 3, 4]),
                                                   (1, 2, [1, 2]), (5, None, [5])])  # fmt: skip
def test_without_names_all_items_in_progress_failed(
    opened: Worker, monkeypatch: pytest.MonkeyPatch, error: Exception, n: int, rows: int | None,
    wanted: list[int],
) -> None:  # fmt: skip
    items = make_items([Row("a", CAPTIONS[0], n=N_ITEMS)], 3)
    fail_after(opened, monkeypatch, n, error)
    failed, made = failed_of(opened, items, rows)
    assert made == items[:n] and failed.items == [items[k] for k in wanted]


@pytest.fixture(scope="module")
def without_grass(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that returns NaN for prompts with the word "grass", and for no others."""
    from safetensors.torch import load_file, save_file

    folder = build_tiny(tmp_path_factory.mktemp("without_grass"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][N_CODES + 3 + WORDS.index("grass")] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_prompt_with_nan_logits_fails_alone(without_grass: Path, tmp_path: Path) -> None:
    worker = Worker(Setup(str(without_grass), tmp_path, rows=4))
    rows = [Row(f"r{k}", CAPTIONS[k % 3]) for k in range(N_ITEMS)]  # the second and the fifth
    failed, _ = failed_of(worker, make_items(rows, 3))
    assert [item.row.id for item in failed.items] == ["r1"]


def test_a_job_tries_the_named_items_alone_again(without_grass: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": f"r{k}", "prompt": CAPTIONS[k % 3]} for k in range(N_ITEMS)]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    out = tmp_path / "out"
    assert main(["generate", "--prompts", str(file), "--model", str(without_grass),
                 "--out", str(out), "--batch-size", "4"]) == 3  # fmt: skip
    records = list(map(json.loads, (out / "manifest.jsonl").read_bytes().splitlines()))
    assert {r["id"] for r in records if r["status"] == "failed"} == {"r1", "r4"}
    assert len(records) == N_ITEMS and len(list(out.glob("*.png"))) == N_ITEMS - 2
