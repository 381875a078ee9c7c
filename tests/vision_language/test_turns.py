"""A chat about the same images: sent again, encoded once by the caller, or in a cache he keeps."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import DivPrune, FastV, HiRED, ILRe, VisionZip
from mmaccel.pipelines.hosts.transformers_release import CACHE
from tests.fixtures.lanes import mostly_slow
from tests.fixtures.tiny_lms import falls_back
from tests.fixtures.tiny_vlms import draw_prompts, shared_vlm
from tests.vision_language.runs import GREEDY, reduces

pytestmark = reduces

NAMES = ["llava", "llava_next", "qwen2_vl", "qwen3_vl"]
METHODS = {"DivPrune": DivPrune(keep=0.5), "FastV": FastV(keep=0.5), "ILRe": ILRe(keep=0.5)}
SAID = torch.tensor([[7, 8, 9]])


def attached(model: Any, method: Any = None, policy: Any = None, strict: bool = True) -> Any:
    policy = policy or mmaccel.Jacobi(4)
    return mmaccel.attach(model, policy, strict=strict, seed=1, visual_tokens=method)


def next_turn(inputs: dict[str, Any], answer: Tensor) -> dict[str, Any]:
    """The prompt, its answer and what is said then, with the same images."""
    ids = torch.cat([answer, SAID], 1)
    found = inputs | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in found:
            longer = ids.shape[1] - found[name].shape[1]
            found[name] = torch.nn.functional.pad(found[name], (0, longer))
    return found


@torch.no_grad()
def encode(model: Any, inputs: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Arguments without pixels, and what the encoder makes of these."""
    function = model.base_model.get_image_features
    names = inspect.signature(function).parameters
    made = function(**{k: v for k, v in inputs.items() if k in names}, return_dict=True)
    return {k: v for k, v in inputs.items() if k != "pixel_values"}, made


@pytest.mark.parametrize("name", mostly_slow(NAMES, "qwen3_vl"))
def test_images_are_encoded_once_for_all_turns(name: str) -> None:
    """`mm_encoder_outputs` of the caller: the tokens are those of pixels; what he keeps stays."""
    model = shared_vlm(name)
    inputs = draw_prompts(name, model, (1, 2))
    given, encoded = encode(model, inputs)
    kept = torch.cat(list(encoded.pooler_output)).clone()
    for method in (None, *METHODS.values()):
        features = {"image": encoded}
        with attached(model, method):
            own = model.generate(**inputs, **GREEDY)
            for _ in range(2):
                made = model.generate(**given, mm_encoder_outputs=features, **GREEDY)
                assert torch.equal(made, own)
        assert features["image"] is encoded
        assert torch.equal(torch.cat(list(encoded.pooler_output)), kept)


@pytest.mark.parametrize("method", [HiRED(keep=0.5), VisionZip(keep=0.5)], ids=repr)
def test_methods_that_read_the_encoder_ask_for_pixels(method: Any) -> None:
    model = shared_vlm("llava_next")
    inputs = draw_prompts("llava_next", model, (1,))
    own = model.generate(**inputs, **GREEDY)
    given, encoded = encode(model, inputs)
    given["mm_encoder_outputs"] = {"image": encoded}
    with falls_back(model, "which reads the encoder as it runs", visual_tokens=method):
        assert torch.equal(model.generate(**given, **GREEDY), own)


@pytest.mark.parametrize("name", mostly_slow([*NAMES, "gemma3"], "llava_next", "gemma3"))
def test_a_cache_that_the_caller_keeps_has_all_tokens(name: str) -> None:
    """The second turn has no new image: it goes on from the cache under the policy."""
    model = shared_vlm(name)
    inputs = draw_prompts(name, model, (1,))

    def talk() -> list[Tensor]:
        out = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
        turn = next_turn(inputs, out.sequences)
        for gone in ("pixel_values", "image_sizes", "image_grid_thw"):
            turn.pop(gone, None)
        turn[CACHE] = getattr(out, CACHE)
        return [out.sequences, model.generate(**turn, **GREEDY)]

    own = talk()
    with attached(model) as run:
        assert all(map(torch.equal, talk(), own))
    assert [stats.fallbacks for stats in run.history] == [[], []]
    with attached(model, DivPrune(keep=0.5), strict=False) as run:
        with pytest.warns(UserWarning, match="a cache that the caller sees"):
            assert all(map(torch.equal, talk(), own))
    assert [len(stats.fallbacks) for stats in run.history] == [1, 0]
