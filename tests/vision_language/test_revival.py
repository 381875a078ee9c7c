"""LazyLLM: every token chooses the visual tokens of its step, and takes dropped ones back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import LazyLLM
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
from mmaccel.reduction.visual_tokens.context import VisualContext
from tests.fixtures.revival_reference import RevivalReference
from tests.fixtures.tiny_vlms import CONFIGS, IMAGE, build_vlm, draw_prompts, shared_vlm
from tests.vision_language.runs import answer, reduces

pytestmark = reduces

N_NEW = 10
LONG = dict(max_new_tokens=N_NEW)
NAMES = [name for name in CONFIGS if name != "gemma3"]  # whose layers slide


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
@pytest.mark.parametrize("name", ["llava", "llava_next", "qwen2_vl"])
@pytest.mark.parametrize("keep", [0.1, 0.3])
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


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_rows_choose_alone(name: str) -> None:
    model = shared_vlm(name)
    method = LazyLLM(keep=0.2, layers=layers_of(name))
    together, stats = answer(model, method, draw_prompts(name, model, (1, 3)), **LONG)
    alone, own = answer(model, method, draw_prompts(name, model, (1,)), **LONG)
    assert torch.equal(alone[0, -N_NEW:], together[0, -N_NEW:])
    assert 0 < n_revived(own) <= n_revived(stats)


CALLS = list[int]()


@dataclass(frozen=True)
class DropsThenWants(LazyLLM):
    """The prompt's pass drops the last visual tokens; from the second step on all are wanted."""

    def budget(self, context: VisualContext) -> Tensor:
        CALLS.append(context.layer or 0)
        dropped = 7 if len(CALLS) <= 2 * len(self.layers or ()) else 0
        return context.initial - dropped

    def score(self, context: VisualContext) -> Tensor:
        return -torch.arange(context.x.shape[1]).expand(len(context.x), -1).float()


@torch.no_grad()
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen3_vl"])
def test_a_revived_token_is_as_if_it_had_stayed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys and values behind the cut are those of the pass over all tokens: the tokens before
    it, which are all that it attends to, stayed.
    """
    model, windows, before = build_vlm(name), [], layers_of(name)
    inputs = draw_prompts(name, model, (2,))
    process = CausalLMWindow.process_prompt

    def record(self: CausalLMWindow) -> Any:
        windows.append(self)
        return process(self)

    monkeypatch.setattr(CausalLMWindow, "process_prompt", record)
    whole = model(**inputs, use_cache=True).past_key_values
    visual = (inputs["input_ids"][0] == IMAGE).nonzero()[:, 0]
    for n_new in (2, 3):
        CALLS.clear()
        with mmaccel.attach(
            model,
            mmaccel.Autoregressive(),
            strict=True,
            visual_tokens=DropsThenWants(keep=0.5, layers=before),
        ) as run:
            model.generate(**inputs, max_new_tokens=n_new, do_sample=False)
        assert n_revived(run.stats) == (7 if n_new == 3 else 0)
        states = windows[-1].run_caches().read(visual[None])
        for number, (found, own) in enumerate(zip(states, whole.layers)):
            for ours, theirs in zip(found, (own.keys, own.values)):
                stayed = torch.isclose(ours[0], theirs[0, :, visual], atol=1e-5).all(-1).all(0)
                assert bool(stayed[:-7].all())
                is_back = number < before[0] or n_new == 3
                assert bool(stayed[-7:].all()) if is_back else not bool(stayed[-7:].any())


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
