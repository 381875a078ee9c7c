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
from mmaccel.pipelines.text_to_image.pipeline import GenerationSettings
from mmaccel.samplers.sampling_params import SamplingParams

SETUP = Setup("tiny", Path("out"))
ITEM = Item(Row("fox", "a red fox"), 0, 7)
SETTINGS = GenerationSettings("jacobi", Jacobi(5), SamplingParams(2.0, 0.9, 40, 0.8, 0.1))
WEIGHTS = "c0ffee"


def digits(
    setup: Setup = SETUP,
    item: Item = ITEM,
    settings: GenerationSettings = SETTINGS,
    weights: str = WEIGHTS,
) -> str:
    return fingerprint(describe(setup, item, settings, weights))


def row(**fields: Any) -> Item:
    return replace(ITEM, row=replace(ITEM.row, **fields))


OTHER_IMAGES: dict[str, dict[str, Any]] = {
    "weights": {"weights": "c0ffef"},
    "dtype": {"setup": replace(SETUP, load=replace(SETUP.load, dtype="bfloat16"))},
    "size": {"setup": replace(SETUP, size="64x32")},
    "size of the row": {"item": row(size=(64, 32))},
    "id": {"item": row(id="foxes")},
    "k": {"item": replace(ITEM, k=1)},
    "seed": {"item": replace(ITEM, seed=8)},
    "prompt": {"item": row(prompt="a red  fox")},
    "negative": {"setup": replace(SETUP, negative="blurred")},
    "negative of the row": {"item": row(negative="blurred")},
    "policy": {"settings": replace(SETTINGS, name="sjd", policy=SpeculativeJacobi(5))},
    "policy options": {"settings": replace(SETTINGS, policy=Jacobi(6))},
    "guidance": {
        "settings": replace(SETTINGS, params=replace(SETTINGS.params, guidance_scale=2.5))
    },
    "temperature": {
        "settings": replace(SETTINGS, params=replace(SETTINGS.params, temperature=0.8))
    },
    "top-k": {"settings": replace(SETTINGS, params=replace(SETTINGS.params, top_k=41))},
    "top-p": {"settings": replace(SETTINGS, params=replace(SETTINGS.params, top_p=None))},
    "min-p": {"settings": replace(SETTINGS, params=replace(SETTINGS.params, min_p=None))},
}
SAME_IMAGE: dict[str, dict[str, Any]] = {
    "name of the model": {"setup": replace(SETUP, model="elsewhere/tiny")},
    "folder": {"setup": replace(SETUP, out=Path("elsewhere"))},
    "device": {"setup": replace(SETUP, load=replace(SETUP.load, device="cuda:1"))},
    "rows at once": {"setup": replace(SETUP, rows=3)},
    "CUDA graphs": {"setup": replace(SETUP, load=replace(SETUP.load, cuda_graphs=True))},
    "line": {"item": row(line=12)},
    "n": {"item": row(n=12)},
    "what the settings include": {"item": row(policy="jacobi", params={"window": 5})},
    "an empty negative": {"item": row(negative="")},
    "an empty negative for all": {"setup": replace(SETUP, negative=" ")},
}


@pytest.mark.parametrize("change", OTHER_IMAGES)
def test_another_image_has_another_fingerprint(change: str) -> None:
    assert digits(**OTHER_IMAGES[change]) != digits()


@pytest.mark.parametrize("change", SAME_IMAGE)
def test_the_same_image_keeps_its_fingerprint(change: str) -> None:
    assert digits(**SAME_IMAGE[change]) == digits() and len(digits()) == 8


def test_four_facts_are_not_in_the_fingerprint() -> None:
    item = replace(row(negative="blurred"), k=2)
    facts = describe(SETUP, item, SETTINGS, WEIGHTS)
    left_out = {
        name for name in facts if fingerprint(facts | {name: "another"}) == fingerprint(facts)
    }
    assert left_out == {"model", "versions", "exactness", "device"}
    expected = {"id", "k", "prompt", "negative", "seed", "weights", "size", "dtype", "policy"}
    assert facts.keys() - left_out == {*expected, "policy_options", *SAMPLING_FIELDS}


def test_size_and_negative_of_the_row_replace_those_of_the_command_line() -> None:
    setup = replace(SETUP, size="96", negative="grey")
    item = row(size=(64, 32), negative="blurred")
    assert digits(setup, item) == digits(item=item) != digits(setup)
    assert digits(setup) == digits(item=row(size=(96, 96), negative="grey"))
