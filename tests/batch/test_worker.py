"""Which items failed when a model raises: those its error names, or those in progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mmaccel.batch.modalities import Images
from mmaccel.batch.prompts import Item, Row, make_items
from mmaccel.batch.ray_executor import WorkerActor
from mmaccel.batch.worker import ItemsFailed, Worker
from mmaccel.errors import NumericsError, OptionError
from mmaccel.pipelines.text_to_image.generator import ImageGenerator
from tests.batch.jobs import Jobs, content, records
from tests.fixtures.tiny_model import CAPTIONS, N_CODES, WORDS, build_tiny

N_ITEMS = 6


@pytest.fixture(scope="module")
def opened(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    return Worker(Images(model=str(tiny_folder), out=tmp_path_factory.mktemp("out"), rows=3))


def failed_of(
    worker: Worker, items: list[Item], rows: int | None = None
) -> tuple[ItemsFailed, list[Item]]:
    """The error, and the finished items in their order."""
    made: set[tuple[str, int]] = set()
    worker.check(items)
    with pytest.raises(ItemsFailed) as caught:
        worker.run_all(items, lambda record: made.add((record["id"], record["k"])), rows)
    return caught.value, [item for item in items if item.key in made]


def test_a_row_is_planned_once_and_its_items_have_fingerprints_of_their_own(
    opened: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Item] = []
    plan = Images.plan
    monkeypatch.setattr(Images, "plan", lambda *a: planned.append(a[1]) or plan(*a))
    items = make_items([Row("many", CAPTIONS[0], n=500)], 0)
    find = opened.check(items)
    assert len(planned) == 1 and len({find(item) for item in items}) == 500


@pytest.mark.parametrize(
    ("n", "named", "rows", "wanted"),
    [
        (0, (0,), None, [0]),
        (0, (1, 2), None, [1, 2]),
        (0, (4,), None, [4]),
        (2, (3,), None, [3]),  # counted from the first item, not from the first unfinished one
        (0, (), None, [0, 1, 2]),
        (2, (), None, [2, 3, 4]),
        (1, (), 2, [1, 2]),
        (5, (), None, [5]),
    ],
)
@pytest.mark.parametrize("is_alike", [True, False])
def test_items_that_the_error_names_failed_or_else_those_in_progress(
    opened: Worker,
    monkeypatch: pytest.MonkeyPatch,
    n: int,
    named: tuple[int, ...],
    rows: int | None,
    wanted: list[int],
    is_alike: bool,
) -> None:
    """Where two policies alternate, an error of the first can name every other item only."""
    run_all, error = ImageGenerator.run_all, NumericsError("no", named)

    def broken(
        self: ImageGenerator, requests: Sequence[Any], settings: Any, on_finish: Any, rows: int
    ) -> None:
        if n:
            run_all(self, requests[:n], settings, on_finish, rows)
        raise error

    monkeypatch.setattr(ImageGenerator, "run_all", broken)
    policies = (None,) if is_alike else (None, "mc-sjd")
    rows_asked = [
        Row(f"{policy}{k}", CAPTIONS[0], policy=policy)
        for k in range(N_ITEMS)
        for policy in policies
    ]
    items = make_items(rows_asked, 3)
    alike = items[:: len(policies)]
    failed, made = failed_of(opened, items, rows)
    assert made == alike[:n] and failed.items == [alike[k] for k in wanted]
    assert failed.__cause__ is error and str(failed) == "NumericsError: no"


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
    rows = [{"id": f"r{k}", "prompt": CAPTIONS[k % 3]} for k in range(N_ITEMS)]
    worker = Worker(Images(model=str(without_grass), out=tmp_path, rows=4))
    items = make_items([Row(row["id"], row["prompt"]) for row in rows], 3)
    assert [item.row.id for item in failed_of(worker, items)[0].items] == ["r1"]
    jobs = Jobs(tmp_path / "job", without_grass)
    assert jobs.run("--batch-size", "4", rows=rows) == 3
    noted = records(jobs.out)
    assert {r["id"] for r in noted if r["status"] == "failed"} == {"r1", "r4"}
    assert len(noted) == N_ITEMS and len(content(jobs.out)) == N_ITEMS - 2


def test_what_fails_ahead_of_the_first_call_fails_in_it(tmp_path: Path) -> None:
    actor = WorkerActor(Setup("no such model", tmp_path))
    actor.load()
    with pytest.raises(OptionError, match="no such model"):
        actor.check([])
