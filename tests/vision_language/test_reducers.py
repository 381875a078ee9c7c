"""What holds for every reducer on every model: all tokens kept, policies, batches.

Which reducers a model refuses is read from the recorded table of what works with what.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import mmaccel
from tests.architecture.source import ROOT
from tests.compatibility.models import READ_VIDEOS
from tests.fixtures.lanes import mostly_slow
from tests.fixtures.tiny_vlms import CONFIGS, draw_prompts, draw_videos, shared_vlm
from tests.vision_language.runs import GREEDY, METHODS, N_NEW, answer, reduces

pytestmark = reduces
REPORT = json.loads((ROOT / "benchmarks/results/compatibility.json").read_text(encoding="utf-8"))
REFUSED = {
    row["name"]: row["visual_tokens"].removeprefix("all but ").split(", ")
    for row in REPORT["compatibility"]
    if row["visual_tokens"] != "-"
}
OF_VIDEOS = ("vidcom2", "evs")
METHODS_OF_VIDEOS = (*OF_VIDEOS, "fastv")
ON_VIDEOS = [(f"{name}, videos", method) for name in READ_VIDEOS for method in METHODS_OF_VIDEOS]
ON_IMAGES = [(name, method) for name in CONFIGS for method in METHODS if method not in OF_VIDEOS]


def is_refused(cell: tuple[str, str]) -> bool:
    name, method = cell
    if method == "pyramid-drop, one layer" and name == "qwen3_vl":
        return False  # whose refusal is of the layers before it
    return type(METHODS[method](keep=0.5)).__name__ in REFUSED[name]


CELLS = [cell for cell in ON_IMAGES if not is_refused(cell)] + ON_VIDEOS


FEW = []  # for the fast lane: of each method one model, by turns
for k, method in enumerate(METHODS):
    takers = [cell for cell in CELLS if cell[1] == method]
    FEW.append(takers[k % len(takers)])
cells = pytest.mark.parametrize(("name", "method"), mostly_slow(CELLS, *FEW))


def draw(name: str) -> tuple[Any, Any]:
    """A model, and a call with rows of two images, of none and of one, or of two videos."""
    family, _, videos = name.partition(", ")
    model = shared_vlm(family)
    if not videos:
        return model, draw_prompts(family, model, (2, 0, 1))
    frames = (3, 3) if family == "llava_onevision" else (2, 3)  # its videos have one length
    return model, draw_videos(family, model, frames)


@cells
def test_keeping_all_changes_nothing(name: str, method: str) -> None:
    model, inputs = draw(name)
    own = model.generate(**inputs, **GREEDY)
    for budget in ({"keep": 1.0}, {"n_keep": 10_000}):
        reducer = METHODS[method](**budget)
        made, stats = answer(model, reducer, inputs)
        assert torch.equal(made, own), budget
        if "keep" in budget or reducer.stage != "llm_layer":  # those know of their tokens late
            assert stats.exactness == "bitwise" and stats.prefill_passes == 0, budget


@cells
def test_policies_and_batches_change_nothing(name: str, method: str) -> None:
    model, inputs = draw(name)
    reducer, seeds = METHODS[method](keep=0.4), [7, 8, 9][: len(inputs["input_ids"])]
    made, stats = answer(model, reducer, inputs, seed=seeds)
    assert stats.exactness == "relaxed" and "tokens" in stats.reference
    if "videos" not in name:
        alone, _ = answer(model, reducer, draw_prompts(name, model, (2,)), seed=[7])
        assert torch.equal(alone[0, -N_NEW:], made[0, -N_NEW:]), "the first row alone"
    if reducer.revives:  # under the plain loop alone
        return
    policy = (mmaccel.Jacobi(5), mmaccel.Speculative())[CELLS.index((name, method)) % 2]
    assert torch.equal(answer(model, reducer, inputs, policy, seeds)[0], made)


EXIT, LAYER = mmaccel.DivPrune(keep=0.5), mmaccel.FastV(keep=0.5)
SMALLER, MERGED = mmaccel.DownsamplePixels(keep=0.25), mmaccel.ToMe(keep=0.5)
STAGES: dict[str, tuple[list[Any], str]] = {
    "llava, layer": ([EXIT, LAYER], "16 of 32 visual tokens, 8 of 16 visual tokens after layer 2"),
    "llava, encoder": (
        [LAYER, MERGED, EXIT],
        "16 of 32 tokens of its encoder, 8 of 32 visual tokens, 4 of 8 visual tokens after",
    ),
    "qwen3_vl, patches": (
        [EXIT, mmaccel.PixelPrune(keep=0.5)],
        "24 of 48 tokens of its encoder, 3 of 12 visual tokens",
    ),
    "llava_next, pixels": (
        [LAYER, EXIT, SMALLER],
        "16 of 140 visual tokens, 8 of 16 visual tokens after layer 2",
    ),
} | {
    f"{name}, recall": ([EXIT, mmaccel.ILRe(keep=0.5)], "recalled in front of layer 1")
    for name in ("llava", "internvl", "llava_onevision", "qwen3_vl")
}


@pytest.mark.parametrize("case", STAGES)
def test_stages_compose(case: str) -> None:
    name = case.partition(",")[0]
    methods, said = STAGES[case]
    model = shared_vlm(name)
    inputs = draw_prompts(name, model, (1, 1))
    made, stats = answer(model, methods, inputs)
    assert said in stats.reference
    assert torch.equal(answer(model, methods, inputs, mmaccel.Jacobi(4))[0], made)
    fewer = [method for method in methods if method is not EXIT]
    assert not torch.equal(made, answer(model, fewer, inputs)[0])


@pytest.mark.parametrize(("name", "method"), list(filter(is_refused, ON_IMAGES)))
def test_what_the_table_calls_refused_is_refused(name: str, method: str) -> None:
    model, inputs = draw(name)
    with pytest.raises(mmaccel.UnsupportedModelError):
        answer(model, METHODS[method](keep=0.5), inputs)
