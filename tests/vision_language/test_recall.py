"""ILRe: a first run up to one layer chooses the visual tokens of the prompt's pass.

What is kept is compared with the method's plan on the attention maps that the model gives out in
its eager attention; what is computed then is in test_exit_reduction.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import ILRe
from mmaccel.reduction.visual_tokens.context import make_context
from mmaccel.reduction.visual_tokens.plan import Plan
from tests.fixtures.tiny_vlms import IMAGE, build_vlm, draw_prompts
from tests.vision_language.runs import answer, position_ids, reduces

pytestmark = reduces


def plan_of_maps(maps: Tensor, ids: Tensor, real: Tensor, method: ILRe, layer: int) -> Plan:
    """The method's plan for one row on attention maps `[H, T, T]` of the layer before."""
    visual = ((ids == IMAGE) & real).nonzero()[:, 0]
    text = ((ids != IMAGE) & real).nonzero()[:, 0]
    mass = maps[:, text][:, :, visual].sum((0, 1))
    context = make_context(
        torch.zeros(1, len(visual), 1), layer=layer, depth=3,
        attention=lambda at, queries, per_head: mass[None], queries=("text",),
    )  # fmt: skip
    return method.plan(context)


@torch.no_grad()
@pytest.mark.parametrize("layer", [1, 2])
def test_the_choice_is_the_plan_on_the_models_own_attention_maps(
    named: tuple[str, Any], layer: int, stays: list[Tensor]
) -> None:
    name, _ = named
    model, method = build_vlm(name), ILRe(keep=0.4, layer=layer)
    inputs = draw_prompts(name, model)
    answer(model, method, inputs)
    (kept,) = stays
    ids, real = inputs["input_ids"], inputs["attention_mask"].bool()
    model.set_attn_implementation("eager")
    given = dict(inputs) | {"position_ids": position_ids(name, model, inputs)}
    maps = model(**given, output_attentions=True, use_cache=False).attentions[layer - 1]
    for row in range(len(ids)):
        visual = (ids[row] == IMAGE).nonzero()[:, 0]
        expected = real[row] & (ids[row] != IMAGE)
        if len(visual):
            plan = plan_of_maps(maps[row], ids[row], real[row], method, layer)
            expected[visual[plan.keep[0]]] = True
        assert torch.equal(kept[row], expected)


def test_the_first_run_stops_in_front_of_the_layer_and_is_counted() -> None:
    model = build_vlm("llava")
    inputs = draw_prompts("llava", model, (1, 1))
    done = [0, 0, 0]  # passes that each layer finished

    def count(index: int) -> Any:
        return lambda *_: done.__setitem__(index, done[index] + 1)

    for index, layer in enumerate(model.get_decoder().layers):
        layer.register_forward_hook(count(index))
    _, stats = answer(model, ILRe(keep=0.25, layer=2), inputs)
    assert done[0] == done[1] == done[2] + 1
    n_whole = inputs["input_ids"].numel()
    n_kept = n_whole - int((inputs["input_ids"] == IMAGE).sum() * 0.75)
    assert stats.prefill_passes == 1  # the prompt's own gives the first tokens
    assert stats.tokens_processed - 2 * (stats.passes - 1) == n_whole + n_kept
