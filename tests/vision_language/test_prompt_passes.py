"""Prompts with images that the model's own prefill processes: in chunks, and tile by tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import mmaccel
from mmaccel.pipelines.hosts.attach import prompt_pass
from mmaccel.pipelines.hosts.layers import attention_function
from tests.fixtures.lanes import mostly_slow
from tests.fixtures.tiny_vlms import CONFIGS, draw_prompts, shared_vlm
from tests.vision_language.runs import reduces

pytestmark = reduces
CALL: dict[str, Any] = {
    "max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True,
}  # fmt: skip


def answer(model: Any, inputs: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """What `generate` gives out, and the statistics."""
    with mmaccel.attach(model, mmaccel.Jacobi(3), strict=True, **options) as run:
        made = model.generate(**inputs, **CALL)
    return made, run.stats


def check_same(made: Any, whole: Any) -> None:
    assert made.sequences.equal(whole.sequences)
    for own, expected in zip(made.logits, whole.logits, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-3)


def check_chunks(name: str, inputs: dict[str, Any], sizes: tuple[int, ...] = (3, 20)) -> None:
    """Chunks of so many tokens give the answers of the whole prompt."""
    model = shared_vlm(name)
    whole, plain = answer(model, inputs)
    rows, width = inputs["input_ids"].shape
    for size in sizes:
        made, stats = answer(model, inputs, prefill_chunk_size=size)
        check_same(made, whole)
        least = -(-width // max(1, size // rows))
        assert stats.prefill_passes == least or name == "gemma3"  # whose images are not divided
        assert stats.prefill_passes > 1
        assert stats.tokens_processed == plain.tokens_processed and stats.notes == []


@pytest.mark.parametrize("name", mostly_slow(CONFIGS, "llava_next", "qwen3_vl", "gemma3"))
def test_chunks_give_the_answers_of_whole_prompts(name: str) -> None:
    check_chunks(name, draw_prompts(name, shared_vlm(name)))


def test_features_of_another_chunk_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_first(model: Any, modality: str, output: Any, ids: Any, stays: Any) -> Any:
        return take(model, modality, output, ids, stays.sort(dim=1, descending=True).values)

    take = prompt_pass.take_features
    inputs = draw_prompts("llava", shared_vlm("llava"), (2,))
    inputs["input_ids"] = inputs["input_ids"].roll(-3, 1)  # images first, words last
    check_chunks("llava", inputs, (20,))
    monkeypatch.setattr(prompt_pass, "take_features", take_first)
    with pytest.raises(AssertionError):
        check_chunks("llava", inputs, (20,))


def test_an_image_that_is_seen_in_both_directions_and_divided_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = draw_prompts("gemma3", shared_vlm("gemma3"), (3,))

    def divide(prefill: prompt_pass.Prefill, columns: int) -> list[int]:
        return [*range(columns, prefill.n_new, columns), prefill.n_new]

    check_chunks("gemma3", inputs, (6,))
    monkeypatch.setattr(prompt_pass.Prefill, "_find_ends", divide)
    with pytest.raises(AssertionError):
        check_chunks("gemma3", inputs, (6,))


@pytest.mark.parametrize(
    ("method", "is_whole"),
    [
        (mmaccel.FastV(keep=0.5, layer=1), True),
        (mmaccel.ILRe(keep=0.5, layer=1), False),
        (mmaccel.DivPrune(keep=0.5), False),
        (mmaccel.ToMe(keep=0.5), False),
    ],
)
def test_reducers_beside_chunks(method: Any, is_whole: bool) -> None:
    model = shared_vlm("llava")
    inputs = draw_prompts("llava", model)
    call: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    with mmaccel.attach(model, mmaccel.Jacobi(3), strict=True, visual_tokens=method) as run:
        whole = model.generate(**inputs, **call)
        assert model.generate(**inputs, **call, prefill_chunk_size=8).equal(whole)
    assert (run.stats.prefill_passes == 1) == is_whole
    assert any("tokens leave it inside" in note for note in run.stats.notes) == is_whole


def count_products(monkeypatch: pytest.MonkeyPatch, model: Any, inputs: dict[str, Any]) -> int:
    """Queries times keys of the prompt's pass, of all layers, which compute what the model does."""
    whole = model.generate(**inputs, **CALL)
    counted: list[int] = []
    attend = F.scaled_dot_product_attention

    def count(query: Any, key: Any, *args: Any, **options: Any) -> Any:
        if query.shape[1] == model.config.get_text_config().num_attention_heads:  # no tower's
            counted.append(query.shape[2] * key.shape[2])
        return attend(query, key, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", count)
        made, _ = answer(model, inputs)
    check_same(made, whole)
    return sum(counted)


@pytest.mark.parametrize("name", mostly_slow(["llava", "qwen2_vl", "gemma3"], "gemma3"))
def test_a_prompt_under_a_mask_is_attended_to_tile_by_tile(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_vlm(name)
    inputs = draw_prompts(name, model, (9, 6))  # rows of unequal lengths
    n_prompt = 3 * inputs["input_ids"].shape[1] ** 2  # of its layers
    n_later = count_products(monkeypatch, model, inputs) - n_prompt
    assert 0 < n_later < n_prompt
    monkeypatch.setattr(attention_function, "TILE", 8)
    share = (count_products(monkeypatch, model, inputs) - n_later) / n_prompt
    assert share < (0.45 if name == "gemma3" else 0.6)  # two of its three layers slide
    monkeypatch.setattr(attention_function, "_find_spans", lambda mask: cut_spans(mask))
    with pytest.raises(AssertionError):
        count_products(monkeypatch, model, inputs)


def cut_spans(mask: Any, find: Any = attention_function._find_spans) -> list[tuple[int, int]]:
    """One key too few for each tile."""
    return [(begin, end - 1) for begin, end in find(mask)]
