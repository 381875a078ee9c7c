"""LazyLLM: every token chooses the visual tokens of its step, and takes dropped ones back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmaccel
from mmaccel import LazyLLM
from tests.fixtures.revival_reference import RevivalReference
from tests.fixtures.tiny_vlms import IMAGE, build_vlm, draw_prompts, shared_vlm
from tests.vision_language.runs import answer, reduces

pytestmark = reduces

N_NEW = 10
LONG = dict(max_new_tokens=N_NEW)


def layers_of(name: str) -> tuple[int, ...]:
    """Layers in front of which a tiny model drops: after those that visual features enter."""
    return (2,) if name == "qwen3_vl" else (1, 2)


def n_revived(stats: Any) -> int:
    (note,) = (note for note in stats.notes if "revived" in note)
    return int(note.split()[1])


def run_reference(reference: RevivalReference, model: Any, inputs: dict[str, Any]) -> list[int]:
    """Greedy tokens of one row with images."""
    ids = inputs["input_ids"][0]
    visual = (ids == IMAGE).nonzero()[:, 0].tolist()
    states = model.get_input_embeddings()(ids)
    places = torch.arange(len(ids))[None]
    names = ("pixel_values", "image_sizes", "image_grid_thw")
    given = {name: inputs[name] for name in names if name in inputs}
    pooled = model.base_model.get_image_features(**given, return_dict=True)
    states[visual] = torch.cat(list(pooled.pooler_output))
    if "image_grid_thw" in inputs:
        grids = {k: inputs[k] for k in ("image_grid_thw", "mm_token_type_ids")}
        mask = torch.ones_like(inputs["input_ids"])
        places, _ = model.base_model.get_rope_index(
            inputs["input_ids"], attention_mask=mask, **grids
        )
    return reference.run(states, places, visual, N_NEW)


@torch.no_grad()
@pytest.mark.parametrize(("name", "keep"), [("llava_next", 0.1), ("qwen2_vl", 0.3)])
def test_every_step_computes_what_the_reference_computes(name: str, keep: float) -> None:
    model, found = build_vlm(name), []
    inputs = draw_prompts(name, model, (2,), seed=3)
    model.register_forward_hook(lambda _model, _given, out: found.append(out.logits[:, -1]))
    before = layers_of(name)
    made, stats = answer(model, LazyLLM(keep=keep, layers=before), inputs, **LONG)
    reference = RevivalReference(model, before, keep)
    assert made[0, -N_NEW:].tolist() == run_reference(reference, model, inputs)
    assert n_revived(stats) > 0
    logits = torch.cat(found[-N_NEW:])
    expected = torch.stack(reference.logits).float()
    assert torch.allclose(logits, expected, atol=1e-4, rtol=1e-4)


def test_what_a_call_says() -> None:
    model = shared_vlm("llava")
    inputs = draw_prompts("llava", model, (1, 1))
    _, stats = answer(model, LazyLLM(n_keep=10_000, layers=(1, 2)), inputs)
    assert n_revived(stats) == 0
    _, stats = answer(model, LazyLLM(keep=0.25, layers=(1, 2)), inputs, **LONG)
    assert "8 of 32 visual tokens after layer 1, at every step (LazyLLM" in stats.reference
    assert stats.exactness == "relaxed" and stats.passes == N_NEW
    with mmaccel.attach(model, "autoregressive", prompt_tokens=LazyLLM(keep=0.25)) as run:
        model.generate(**inputs, do_sample=False, max_new_tokens=2)
    assert run.stats.fallbacks == ["prompt_tokens with images, of which visual_tokens drops some"]
