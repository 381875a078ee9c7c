"""The fingerprint of an item: it changes with everything that gives another image, only then.

`--resume` keeps an image whose fingerprint is unchanged.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmaccel import Jacobi, SpeculativeJacobi
from mmaccel.batch.prompts import Item, Row
from mmaccel.batch.worker import Setup, describe, fingerprint
from mmaccel.options import SAMPLING_FIELDS
from mmaccel.pipelines.text_to_image.generator import GenerationSettings
from mmaccel.samplers.sampling_params import SamplingParams

SETUP = Setup("tiny", Path("out"))
ITEM = Item(Row("fox", "a red fox"), 0, 7)
SETTINGS = GenerationSettings("jacobi", Jacobi(5), SamplingParams(2.0, 0.9, 40, 0.8, 0.1))


def digits(setup: Setup = SETUP, item: Item = ITEM, weights: str = "c0ffee", **own: Any) -> str:
    """Of the same item, with other fields of the settings."""
    return fingerprint(describe(setup, item, replace(SETTINGS, **own), weights))


def of_row(**fields: Any) -> str:
    return digits(item=replace(ITEM, row=replace(ITEM.row, **fields)))


def of_setup(**fields: Any) -> str:
    return digits(setup=replace(SETUP, **fields))


def of_load(**fields: Any) -> str:
    return of_setup(load=replace(SETUP.load, **fields))


def of_params(**fields: Any) -> str:
    return digits(params=replace(SETTINGS.params, **fields))


COUNTS = {"top_k": 41, "spread": 2}
OTHER_IMAGES = {
    "weights": digits(weights="c0ffef"),
    "dtype": of_load(dtype="bfloat16"),
    "size": of_setup(size="64x32"),
    "size of the row": of_row(size=(64, 32)),
    "id": of_row(id="foxes"),
    "k": digits(item=replace(ITEM, k=1)),
    "seed": digits(item=replace(ITEM, seed=8)),
    "prompt": of_row(prompt="a red  fox"),
    "negative": of_setup(negative="blurred"),
    "negative of the row": of_row(negative="blurred"),
    "policy": digits(name="sjd", policy=SpeculativeJacobi(5)),
    "policy options": digits(policy=Jacobi(6)),
    **{name: of_params(**{name: COUNTS.get(name, 0.75)}) for name in SAMPLING_FIELDS},
    "no top_p": of_params(top_p=None),
}
SAME_IMAGE = {
    "name of the model": of_setup(model="elsewhere/tiny"),
    "folder": of_setup(out=Path("elsewhere")),
    "device": of_load(device="cuda:1"),
    "rows at once": of_setup(rows=3),
    "CUDA graphs": of_load(cuda_graphs=True),
    "line": of_row(line=12),
    "n": of_row(n=12),
    "what the settings include": of_row(policy="jacobi", params={"window": 5}),
    "an empty negative": of_row(negative=""),
    "an empty negative for all": of_setup(negative=" "),
}


@pytest.mark.parametrize("change", [*OTHER_IMAGES, *SAME_IMAGE])
def test_a_fingerprint_is_that_of_the_image(change: str) -> None:
    changed = (OTHER_IMAGES | SAME_IMAGE)[change]
    assert len(changed) == 8 and (changed == digits()) == (change in SAME_IMAGE)


def test_four_facts_are_not_in_the_fingerprint() -> None:
    item = replace(ITEM, k=2, row=replace(ITEM.row, negative="blurred"))
    facts = describe(SETUP, item, SETTINGS, "c0ffee")
    whole = fingerprint(facts)
    left_out = {name for name in facts if fingerprint(facts | {name: "another"}) == whole}
    assert left_out == {"model", "versions", "exactness", "device"}
    expected = {"id", "k", "prompt", "negative", "seed", "weights", "size", "dtype", "policy"}
    sampling = {name for name in SAMPLING_FIELDS if getattr(SETTINGS.params, name) is not None}
    assert facts.keys() - left_out == {*expected, "policy_options", *sampling}


def test_rules_that_are_not_used_are_not_recorded() -> None:
    """So that a picture keeps its name when the library learns another rule."""
    assert of_params(top_h=None) == digits() != of_params(top_p=None)


def test_size_and_negative_of_the_row_replace_those_of_the_command_line() -> None:
    setup, own = replace(SETUP, size="96", negative="grey"), {"size": (64, 32), "negative": "red"}
    item = replace(ITEM, row=replace(ITEM.row, **own))
    assert digits(setup, item) == of_row(**own) != digits(setup)
    assert digits(setup) == of_row(size=(96, 96), negative="grey")
