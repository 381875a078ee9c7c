"""Fewer visual tokens in front of the first layer: which columns go, and what the rest computes.

The reference is the whole prompt under a mask that hides the dropped tokens, at the positions that
all tokens had. It is run by the model itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import DivPrune, ILRe, RandomTokens, UniformTokens
from tests.fixtures.tiny_vlms import IMAGE, VIDEO, draw_prompts, draw_videos, shared_vlm
from tests.vision_language.runs import GREEDY, answer, position_ids, reduces

pytestmark = reduces


@torch.no_grad()
@pytest.mark.parametrize("method", [RandomTokens(keep=0.5), ILRe(keep=0.4)], ids=repr)
def test_the_rest_computes_what_a_mask_over_the_whole_prompt_computes(
    named: tuple[str, Any], method: Any, stays: list[Tensor]
) -> None:
    name, model = named
    if name == "gemma3":  # a sliding window counts the columns that there are
        model = shared_vlm(name, window=512)
    inputs = draw_prompts(name, model)
    made, stats = answer(model, method, inputs)
    (kept,) = stays
    ids = inputs["input_ids"]
    is_text = (ids != IMAGE) & inputs["attention_mask"].bool()
    assert bool((kept | ~is_text).all()) and stats.exactness == "relaxed"
    before = int((ids == IMAGE).sum())
    after = int((kept & (ids == IMAGE)).sum())
    said = " recalled in front of layer 1" if isinstance(method, ILRe) else ""
    assert f"{after} of {before} visual tokens{said}" in stats.reference and after < 0.7 * before
    positions = position_ids(name, model, inputs)
    hidden = {"attention_mask": kept.long(), "position_ids": positions}
    assert torch.equal(made, model.generate(**inputs | hidden, **GREEDY))


def test_images_and_videos_of_one_prompt() -> None:
    """Qwen2-VL's: two images, then a video behind them."""
    model = shared_vlm("qwen2_vl")
    inputs, videos = draw_prompts("qwen2_vl", model, (2,)), draw_videos("qwen2_vl", model, (2,))
    names = ("input_ids", "attention_mask", "mm_token_type_ids")
    both = {name: torch.cat([inputs[name], videos[name]], 1) for name in names}
    inputs = {**inputs, **videos, **both}
    ids = inputs["input_ids"]
    with mmaccel.attach(model, "jacobi", strict=True, visual_tokens=DivPrune(keep=0.5)) as run:
        made = model.generate(**inputs, **GREEDY)
    kept = inputs["attention_mask"].clone()
    for modality, placeholder in (("image", IMAGE), ("video", VIDEO)):
        own = [each.kept for each in run.kept_tokens if each.modality == modality]
        kept[ids == placeholder] = torch.cat(own).long()
    assert "14 of 28 visual tokens" in run.stats.reference and int((1 - kept).sum()) == 14
    hidden = {"attention_mask": kept, "position_ids": position_ids("qwen2_vl", model, inputs)}
    assert torch.equal(made, model.generate(**inputs | hidden, **GREEDY))


def test_a_shorter_prompt_is_processed() -> None:
    """The first pass has the kept columns alone."""
    model = shared_vlm("llava_next")
    inputs, widths = draw_prompts("llava_next", model, (1, 1)), list[int]()
    answer(model, None, inputs)  # with the model's self-check
    layer = model.get_decoder().layers[0]
    hook = layer.register_forward_pre_hook(lambda _m, given: widths.append(given[0].shape[1]))
    answer(model, UniformTokens(keep=0.25), inputs)
    hook.remove()
    counts = (inputs["input_ids"] == IMAGE).sum(1)
    n_text = inputs["attention_mask"].sum(1) - counts
    assert widths[0] <= int((n_text + 0.25 * counts).max()) + 1


def test_no_image_runs_plain() -> None:
    model = shared_vlm("llava")
    inputs = {"input_ids": torch.randint(5, 30, (2, 6))}
    made, stats = answer(model, RandomTokens(keep=0.5), inputs)
    assert torch.equal(made, model.generate(**inputs, **GREEDY))
    assert stats.exactness == "bitwise" and stats.reference == ""
    assert stats.notes == ["visual_tokens: no image in the prompt, nothing to drop"]
