"""Workers: which items failed, and what the fingerprint of an item depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmaccel import Jacobi, TextToImage
from mmaccel.batch.modalities import Images, Settings
from mmaccel.batch.prompts import Item, Row, make_items
from mmaccel.batch.worker import ItemsFailed, Worker, fingerprint
from mmaccel.errors import NumericsError
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures.jobs import Command, folders, records
from tests.fixtures.tiny_model import CAPTIONS, N_CODES, WORDS, build_tiny

N_ITEMS = 6


@pytest.mark.parametrize(
    ("n", "named", "rows", "wanted"),
    [
        (2, (3,), None, [3]),  # counted from the first item, not from the first unfinished one
        (2, (), None, [2, 3, 4]),
        (1, (), 2, [1, 2]),
    ],
)
def test_items_that_the_error_names_failed_or_else_those_in_progress(
    tmp_path: Path, monkeypatch: Any, n: int, named: Any, rows: int | None, wanted: list[int]
) -> None:
    """Where two policies alternate, an error of the first can name every other item only."""
    serve, error = TextToImage.serve, NumericsError("no", named)

    def broken(self: Any, requests: Sequence[Any], *given: Any, **options: Any) -> None:
        if n:
            serve(self, requests[:n], *given, **options)
        raise error

    monkeypatch.setattr(TextToImage, "serve", broken)
    worker = Worker(Images(model=str(folders("images")[0]), out=tmp_path, rows=3))
    policies = (None, "mc-sjd")
    asked = [Row(f"{p}{k}", CAPTIONS[0], policy=p) for k in range(N_ITEMS) for p in policies]
    items, made = make_items(asked, 3), list[str]()
    with pytest.raises(ItemsFailed, match="NumericsError: no") as caught:
        worker.run_all(items, lambda record: made.append(record["id"]), rows)
    assert sorted(made) == [item.row.id for item in items[: 2 * n : 2]]
    assert caught.value.items == [items[2 * k] for k in wanted]


def test_a_prompt_with_nan_logits_fails_alone(images: Command, tmp_path_factory: Any) -> None:
    """The model returns NaN for prompts with the word "grass", and for no others."""
    from safetensors.torch import load_file, save_file

    folder = build_tiny(tmp_path_factory.mktemp("without_grass"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][N_CODES + 3 + WORDS.index("grass")] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    rows = [{"id": f"r{k}", "prompt": CAPTIONS[k % 3]} for k in range(N_ITEMS)]
    assert images.job("--batch-size", 4, "--model", folder, rows=rows) == 3
    noted = records(images.out)
    assert {r["id"] for r in noted if r["status"] == "failed"} == {"r1", "r4"}
    assert len(noted) == N_ITEMS and len(images.content) == N_ITEMS - 2


def describe(images: Images, item: Item) -> dict[str, Any]:
    settings = Settings("jacobi", Jacobi(5), SamplingParams(2.0, 0.9, 40, 0.8, 0.1))
    model = SimpleNamespace(kind="window")
    return images.describe(item, settings, {"weights": "c0ffee"}, model)


def test_a_fingerprint_changes_with_what_gives_another_image_and_only_then() -> None:
    """`--resume` keeps an image whose fingerprint is unchanged, from version to version."""
    images, item = Images(model="tiny"), Item(Row("fox", "a red fox", line=3, n=2), 0, 7)
    facts = describe(images, item)
    assert fingerprint(facts) == "01bf5678"
    same = {name for name in facts if fingerprint(facts | {name: "another"}) == "01bf5678"}
    assert same == {"model", "versions", "exactness", "device"}
    sampling = {"guidance_scale", "temperature", "top_k", "top_p", "min_p"}
    own = {"id", "k", "prompt", "seed", "weights", "size", "dtype", "policy", "policy_options"}
    assert facts.keys() - same == sampling | own
    usual = replace(images, size="96", negative="grey", rows=3, out=Path("elsewhere"))
    row = replace(item.row, size=(64, 32), negative="red")
    assert describe(usual, replace(item, row=row)) == describe(images, replace(item, row=row))
    assert describe(usual, item) == facts | {"size": [96, 96], "negative": "grey"}
    assert describe(images, replace(item, row=replace(row, size=None, negative=""))) == facts
