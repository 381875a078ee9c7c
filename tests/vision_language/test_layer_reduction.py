"""Visual tokens dropped inside the language model, and the caches of unequal length behind it.

The reference runs the whole sequence anew for every token, without a cache; from the cut's layer on
a mask hides the dropped columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import DART, FastV, PyramidDrop
from mmaccel.pipelines.hosts.attach import prompt_pass
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.causal_lm.own_prompt import OwnPrompt, PromptStates
from mmaccel.pipelines.hosts.layers.store import KVCacheLayout
from mmaccel.pipelines.hosts.prompt_cuts import layers
from tests.fixtures.lanes import mostly_slow
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_vlms import CONFIGS, IMAGE, build_vlm, draw_prompts, shared_vlm
from tests.vision_language.runs import GREEDY, N_NEW, answer, reduces

pytestmark = reduces

NAMES = [name for name in CONFIGS if name != "gemma3"]  # whose layers slide
METHODS = {
    "FastV": FastV(keep=0.5, layer=2),
    "DART": DART(keep=0.3, layer=2),
    "PyramidDrop": PyramidDrop(keep=0.3, layers=(1, 2)),
}
NEVER = torch.finfo(torch.float32).min


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[Tensor, Tensor]]:
    """Layer -> columns `[B, T']` of the whole prompt, and which are real, of the last call."""
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def record(*given: Any) -> PromptStates:
        states = PromptStates(*given)
        found.update({cut.first: (cut.columns, cut.mask) for cut in states.cuts})
        return states

    monkeypatch.setattr(prompt_pass, "PromptStates", record)
    return found


@contextmanager
def hidden_columns(model: Any, seen: dict[int, Tensor]) -> Iterator[None]:
    """Inside the block, layers from each number on see the columns `[B, T]` bool alone."""

    def hook_of(index: int) -> Any:
        own = seen[max(first for first in seen if first <= index)]

        def hook(layer: Any, args: Any, given: dict[str, Any]) -> Any:
            width = args[0].shape[1]
            causal = torch.ones(width, width, dtype=torch.bool).tril()
            sees = causal & own[:, None, None, :] | torch.eye(width, dtype=torch.bool)
            return args, {**given, "attention_mask": torch.zeros(sees.shape).where(sees, NEVER)}

        return hook

    decoder = model.get_decoder().layers
    hooks = [
        layer.register_forward_pre_hook(hook_of(index), with_kwargs=True)
        for index, layer in enumerate(decoder)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def reference(model: Any, inputs: dict[str, Any], kept: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    """Greedy tokens `[B, T + N_NEW]`, by passes over the whole sequence."""
    inputs = dict(inputs)
    mask = inputs["attention_mask"].bool()
    seen = {0: mask}
    for index, (order, is_real) in kept.items():
        stays = torch.zeros_like(mask)
        for row in range(len(mask)):
            stays[row, order[row][is_real[row]]] = True
        seen[index] = stays
    for _ in range(N_NEW):
        given = dict(inputs)
        if "image_grid_thw" not in given:
            given["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        with hidden_columns(model, seen):
            logits = model(**given, use_cache=False).logits[:, -1]
        ids = torch.cat([inputs["input_ids"], logits.argmax(-1)[:, None]], 1)
        inputs |= {"input_ids": ids, "attention_mask": _longer(inputs["attention_mask"], 1)}
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = _longer(inputs["mm_token_type_ids"], 0)
        seen = {first: _longer(own, True) for first, own in seen.items()}
    return inputs["input_ids"]


def _longer(values: Tensor, value: Any) -> Tensor:
    return torch.cat([values, values.new_full((len(values), 1), value)], 1)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("name", mostly_slow(NAMES, "llava", "qwen3_vl"))
def test_layers_behind_a_cut_compute_what_a_mask_computes(
    name: str, method: Any, kept: dict[int, tuple[Tensor, Tensor]]
) -> None:
    model = shared_vlm(name)
    if name == "qwen3_vl" and isinstance(method, PyramidDrop):
        method = PyramidDrop(keep=0.3, layers=(2,))
    inputs = draw_prompts(name, model)
    made, stats = answer(model, method, inputs)
    widths = [order.shape[1] for order, _ in kept.values()]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < inputs["input_ids"].shape[1] and stats.exactness == "relaxed"
    assert torch.equal(made, reference(model, inputs, kept))


def test_fastv_keeps_what_the_models_own_attention_map_says(
    kept: dict[int, tuple[Tensor, Tensor]],
) -> None:
    model = build_vlm("llava")
    inputs = draw_prompts("llava", model, (1, 1))
    answer(model, FastV(keep=0.25, layer=2), inputs)
    order, is_real = kept[2]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(**inputs, output_attentions=True, use_cache=False).attentions
    for row in range(2):
        visual = (inputs["input_ids"][row] == IMAGE).nonzero()[:, 0]
        mass = maps[1][row, :, -1, visual].mean(0)
        best = visual[mass.topk(4).indices].sort().values
        columns = order[row][is_real[row]]
        assert columns[inputs["input_ids"][row][columns] == IMAGE].tolist() == best.tolist()


def test_later_layers_cache_less(monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = shared_vlm("llava_next"), []
    shorten = KVCacheLayout.shorten

    def record(self: Any, dropped: Tensor) -> Any:
        shorter = shorten(self, dropped)
        found.append(shorter.max_length)
        return shorter

    monkeypatch.setattr(KVCacheLayout, "shorten", record)
    inputs = draw_prompts("llava_next", model, (1, 1))
    answer(model, PyramidDrop(keep=0.2, layers=(1, 2)), inputs)
    first, second = found  # of the layers behind each cut
    n_images = int((inputs["input_ids"] == IMAGE).sum(1).min())
    whole = inputs["input_ids"].shape[1] + N_NEW
    assert second < first < whole and second <= whole - 0.75 * n_images


@pytest.mark.parametrize("bug", ["one index too many", "positions counted anew", "padding is seen"])
def test_planted_bugs_are_seen(
    bug: str, kept: dict[int, tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_vlm("llava")
    inputs = draw_prompts("llava", model)
    if bug == "one index too many":
        shorten = KVCacheLayout.shorten
        monkeypatch.setattr(
            KVCacheLayout, "shorten", lambda self, dropped: shorten(self, dropped - 1)
        )
    elif bug == "positions counted anew":
        own = layers.PromptCuts.arguments

        def counted(self: Any, given: dict[str, Any], hidden: Tensor) -> dict[str, Any]:
            width = hidden.shape[1]
            first = tuple(values[:, :width] for values in given["position_embeddings"])
            return own(self, given, hidden) | {"position_embeddings": first}

        monkeypatch.setattr(layers.PromptCuts, "arguments", counted)
    else:
        shorten = layers.shorten_mask
        monkeypatch.setattr(
            layers,
            "shorten_mask",
            lambda mask, order, is_real: shorten(mask, order, torch.ones_like(is_real)),
        )
    made, _ = answer(model, FastV(keep=0.5, layer=1), inputs)
    assert not torch.equal(made, reference(model, inputs, kept))


def test_passes_over_layers_of_unequal_length_are_not_captured() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    for is_cut in (False, True):
        own = OwnPrompt(mask, mask.sum(1), lambda sparse, size: None, is_cut=is_cut)
        window = CausalLMWindow(build_lm("llama"))
        window.own_prompt = own
        assert ("cache fewer tokens" in window.lack("captured steps")) == is_cut
    window.own_prompt = OwnPrompt(mask, mask.sum(1) + 1, lambda sparse, size: None)
    assert "token types, or positions" in window.lack("captured steps")


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_cuts_leave_the_fused_decoder_on(method: Any) -> None:
    model = shared_vlm("llava")
    inputs = draw_prompts("llava", model)
    with mmaccel.attach(model, "jacobi", fused=True, strict=True, visual_tokens=method) as run:
        model.generate(**inputs, **GREEDY)
    assert run.stats.route in ("fused", "compiled") and run.stats.route_reason == ""
    assert run.stats.runner_reason != ""  # on a CPU, or layers that cache fewer tokens
    revives = mmaccel.LazyLLM(keep=0.3, layers=(1, 2))
    _, stats = answer(model, revives, inputs)
    assert stats.route == "model" and "revived in the model's own layers" in stats.route_reason
