"""The fingerprint of an item: what gives another image changes it, and nothing else does.

Where it does not change, `--resume` keeps the images that are there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmaccel import Autoregressive, GroupedSpeculative, Jacobi, SpeculativeJacobi
from mmaccel.batch import worker as worker_module
from mmaccel.batch.prompts import Item, Row
from mmaccel.batch.worker import Setup, describe, fingerprint
from mmaccel.outputs.image_files import SAMPLING_FIELDS
from mmaccel.pipelines.text_to_image.generator import GenerationSettings
from mmaccel.samplers.sampling_params import SamplingParams

SETUP = Setup("tiny", Path("out"))
ITEM = Item(Row("fox", "a red fox"), 0, 7)
RECIPE = GenerationSettings("jacobi", Jacobi(5), SamplingParams(2.0, 0.9, 40, 0.8, 0.1))
WEIGHTS = "c0ffee"


def mark(
    setup: Setup = SETUP,
    item: Item = ITEM,
    recipe: GenerationSettings = RECIPE,
    weights: str = WEIGHTS,
) -> str:
    return fingerprint(describe(setup, item, recipe, weights))


def row(**fields: Any) -> Item:
    return replace(ITEM, row=replace(ITEM.row, **fields))


OTHER_IMAGES: dict[str, dict[str, Any]] = {
    "weights": {"weights": "c0ffef"},
    "dtype": {"setup": replace(SETUP, dtype="bfloat16")},
    "size": {"setup": replace(SETUP, size="64x32")},
    "size of the row": {"item": row(size=(64, 32))},
    "id": {"item": row(id="foxes")},
    "k": {"item": replace(ITEM, k=1)},
    "seed": {"item": replace(ITEM, seed=8)},
    "prompt": {"item": row(prompt="a red  fox")},
    "negative": {"setup": replace(SETUP, negative="blurred")},
    "negative of the row": {"item": row(negative="blurred")},
    "policy": {"fingerprint": replace(RECIPE, name="sjd", policy=SpeculativeJacobi(5))},
    "policy options": {"fingerprint": replace(RECIPE, policy=Jacobi(6))},
    "guidance": {"fingerprint": replace(RECIPE, params=replace(RECIPE.params, guidance_scale=2.5))},
    "temperature": {"fingerprint": replace(RECIPE, params=replace(RECIPE.params, temperature=0.8))},
    "top-k": {"fingerprint": replace(RECIPE, params=replace(RECIPE.params, top_k=41))},
    "top-p": {"fingerprint": replace(RECIPE, params=replace(RECIPE.params, top_p=None))},
    "min-p": {"fingerprint": replace(RECIPE, params=replace(RECIPE.params, min_p=None))},
}
SAME_IMAGE: dict[str, dict[str, Any]] = {
    "name of the model": {"setup": replace(SETUP, model="elsewhere/tiny")},
    "folder": {"setup": replace(SETUP, out=Path("elsewhere"))},
    "device": {"setup": replace(SETUP, device="cuda:1")},
    "rows at once": {"setup": replace(SETUP, rows=3)},
    "CUDA graphs": {"setup": replace(SETUP, cuda_graphs="on")},
    "line": {"item": row(line=12)},
    "n": {"item": row(n=12)},
    "what the row leaves to the recipe": {"item": row(policy="jacobi", params={"window": 5})},
    "an empty negative": {"item": row(negative="")},
    "an empty negative for all": {"setup": replace(SETUP, negative=" ")},
}


@pytest.mark.parametrize("change", OTHER_IMAGES)
def test_another_image_has_another_fingerprint(change: str) -> None:
    assert mark(**OTHER_IMAGES[change]) != mark()


def test_no_two_of_these_images_share_a_fingerprint() -> None:
    """But those of one size, or one negative, whoever named it."""
    marks = {change: mark(**changed) for change, changed in OTHER_IMAGES.items()}
    for name in ("size", "negative"):
        assert marks.pop(f"{name} of the row") == marks[name]
    assert len(set(marks.values())) == len(marks)


@pytest.mark.parametrize("change", SAME_IMAGE)
def test_the_same_image_keeps_its_fingerprint(change: str) -> None:
    assert mark(**SAME_IMAGE[change]) == mark() and len(mark()) == 8


def test_versions_and_promises_are_noted_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = mark()
    monkeypatch.setattr(worker_module, "versions", lambda: {"torch": "99"})
    monkeypatch.setattr(worker_module, "exactness_in", lambda exactness, dtype: "none")
    facts = describe(SETUP, ITEM, RECIPE, WEIGHTS)
    assert facts["versions"] == {"torch": "99"} and facts["exactness"] == "none"
    assert fingerprint(facts) == before == mark()


def test_every_fact_is_in_the_fingerprint_or_left_out_on_purpose() -> None:
    item = replace(row(negative="blurred"), k=2)
    facts = describe(SETUP, item, RECIPE, WEIGHTS)
    left_out = {
        name for name in facts if fingerprint(facts | {name: "another"}) == fingerprint(facts)
    }
    assert left_out == {"model", "versions", "exactness", "device"}
    told = {"id", "k", "prompt", "negative", "seed", "weights", "size", "dtype", "policy"}
    assert facts.keys() - left_out == {*told, "policy_options", *SAMPLING_FIELDS}


@pytest.mark.parametrize(
    ("policy", "field", "value"),
    [
        (Jacobi(5), "window", 6),
        (SpeculativeJacobi(5), "coupling", "gumbel"),
        (GroupedSpeculative(5), "group", 3),
        (GroupedSpeculative(5), "window", 6),
    ],
)
def test_every_option_of_a_policy_is_in_the_fingerprint(
    policy: Any, field: str, value: object
) -> None:
    one = replace(RECIPE, policy=policy)
    other = replace(RECIPE, policy=replace(policy, **{field: value}))
    assert getattr(policy, field) != value and mark(recipe=one) != mark(recipe=other)


def test_the_command_line_s_size_and_negative_give_way_to_the_row_s() -> None:
    setup = replace(SETUP, size="96", negative="grey")
    item = row(size=(64, 32), negative="blurred")
    assert mark(setup, item) == mark(item=item) != mark(setup)
    assert mark(setup) == mark(item=row(size=(96, 96), negative="grey"))


def test_a_policy_that_takes_no_options_is_told_by_its_name() -> None:
    plain = GenerationSettings("autoregressive", Autoregressive(), RECIPE.params)
    assert vars(plain.policy) == {}
    assert mark(recipe=plain) != mark(recipe=replace(plain, name="another"))
