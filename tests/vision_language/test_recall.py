"""ILRe: a first run up to one layer chooses the visual tokens of the prompt's pass.

What is kept is compared with the method's plan on the attention maps that the model gives out in
its eager attention; what is computed then is in test_exit_reduction.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import DivPrune, ILRe
from mmaccel.reduction.visual_tokens.context import make_context
from mmaccel.reduction.visual_tokens.plan import Plan
from tests.fixtures.tiny_vlms import IMAGE, build_vlm, draw_prompts, shared_vlm
from tests.vision_language.runs import GREEDY, answer, position_ids, reduces

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


def test_keeping_all_makes_no_first_run() -> None:
    model = shared_vlm("llava")
    inputs = draw_prompts("llava", model)
    answer(model, None, inputs)  # with the model's self-check
    began = list[int]()
    hook = model.get_decoder().layers[0].register_forward_pre_hook(lambda *_: began.append(1))
    answer(model, None, inputs)
    n_plain = len(began)
    for method in (ILRe(keep=1), ILRe(n_keep=10_000)):
        began.clear()
        _, stats = answer(model, method, inputs)
        assert stats.prefill_passes == 0 and len(began) == n_plain
    hook.remove()


def test_a_row_of_more_text_changes_nothing() -> None:
    """Its neighbour has an image where the longer row has text."""
    model, method = shared_vlm("llava"), ILRe(keep=0.3, layer=2)
    alone = draw_prompts("llava", model, (1,))
    words = torch.randint(5, 30, alone["input_ids"].shape)
    mask = torch.ones_like(words)
    together = alone | {
        "input_ids": torch.cat([alone["input_ids"], words]),
        "attention_mask": torch.cat([alone["attention_mask"], mask]),
    }
    made, _ = answer(model, method, together)
    assert torch.equal(made[:1], answer(model, method, alone)[0])


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


@pytest.mark.parametrize("name", ["llava", "llava_next", "qwen2_vl"])
def test_what_was_recalled_can_be_asked_for(name: str, stays: list[Tensor]) -> None:
    model = shared_vlm(name)
    inputs = draw_prompts(name, model, (2, 0, 1))
    for methods in (ILRe(keep=0.4), [DivPrune(keep=0.5), ILRe(keep=0.5)]):
        stays.clear()
        with mmaccel.attach(model, "jacobi", strict=True, visual_tokens=methods) as run:
            model.generate(**inputs, **GREEDY)
        columns = torch.arange(inputs["input_ids"].shape[1]).expand_as(inputs["input_ids"])
        for kept in stays:  # each of the columns that the one before left
            columns = [row[own] for row, own in zip(columns, kept, strict=True)]
            width = max(map(len, columns))
            columns = [torch.cat([row.new_zeros(width - len(row)), row]) for row in columns]
        for row, ids in enumerate(inputs["input_ids"]):
            said = [each.kept for each in run.kept_tokens if each.row == row]
            visual = (ids == IMAGE).nonzero()[:, 0]
            own = torch.isin(visual, columns[row])
            assert torch.equal(torch.cat([*said, own[:0]]), own)
