"""`kv_cache` and `attention` of a call of `TextToImage`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from tests.fixtures.checkpoints import SIZES, build_checkpoint, captions
from tests.fixtures.lanes import mostly_slow
from tests.layers.test_llamagen import LargestValues

METHODS = {
    "llamagen-t2i": {"kv_cache": LargestValues(3), "attention": mmaccel.Quest(0.5, 4, 0)},
    "llamagen-c2i": {"attention": mmaccel.Quest(0.5, 4, 0)},
    "emu3": {"kv_cache": mmaccel.SnapKV(4, window=2), "attention": mmaccel.Quest(0.4, 4, 0)},
}


@pytest.fixture(scope="module", params=mostly_slow(METHODS, "llamagen-t2i"))
def family(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[str, TextToImage]:
    name: str = request.param
    folder: Path = tmp_path_factory.mktemp(name)
    source = build_checkpoint(name, folder)
    return name, TextToImage.from_pretrained(
        source, device="cpu", dtype="fp32", size=SIZES.get(name)
    )


def draw(family: tuple[str, TextToImage], policy: Any, **methods: Any) -> Any:
    name, pipe = family
    return pipe(captions(name)[:2], policy=policy, seed=3, output_type="tokens", **methods)


@pytest.mark.parametrize("slot", ["kv_cache", "attention"])
def test_images_under_methods(family: tuple[str, TextToImage], slot: str) -> None:
    if slot not in METHODS[family[0]]:
        pytest.skip("refused: a pipeline of its own")
    method = {slot: METHODS[family[0]][slot]}
    jacobi = mmaccel.Jacobi(window=5)
    whole = draw(family, jacobi)
    reduced = draw(family, mmaccel.Autoregressive(), **method)
    assert reduced.stats.exactness == "relaxed" and repr(method[slot]) in reduced.stats.reference
    assert not torch.equal(reduced.tokens, whole.tokens)
    after = draw(family, jacobi)
    assert torch.equal(after.tokens, whole.tokens) and after.stats.exactness == "bitwise"


@pytest.mark.slow
def test_methods_that_cover_everything(family: tuple[str, TextToImage]) -> None:
    kv_cache = mmaccel.SnapKV(500) if family[0] == "emu3" else None
    covered = draw(family, "jacobi", kv_cache=kv_cache, attention={"name": "quest", "budget": 1})
    assert torch.equal(covered.tokens, draw(family, "jacobi").tokens)
    assert covered.stats.exactness == "bitwise" and not covered.stats.reference
