"""A draft model of text alone for a vision-language model: it reads the prompt without images."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import mmaccel
from mmaccel.samplers.drafting.contract import Drafts
from mmaccel.samplers.drafting.draft_model import ModelDrafter
from tests.fixtures.lanes import mostly_slow
from tests.fixtures.tiny_vlms import CONFIGS, IMAGE, TEXT, draw_prompts, shared_vlm
from tests.vision_language.runs import answer

WINDOW, N_NEW = 4, 12
GREEDY = dict(max_new_tokens=N_NEW, do_sample=False)


@cache
def build_drafter() -> Any:
    """A tiny Llama with the vocabulary of the tiny models."""
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**TEXT | {"num_hidden_layers": 1})
    ).eval()
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight.mul_(8 if weight.ndim == 2 else 1)
    return model


def policy_with(drafter: Any) -> Any:
    return mmaccel.Speculative(window=WINDOW, draft_model=mmaccel.CausalLMWindow(drafter))


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Those of every pass, `[B, W - 1]`."""
    found, propose = [], ModelDrafter.propose

    def record(self: ModelDrafter, run: Any) -> Drafts:
        made = propose(self, run)
        assert made.tokens is not None
        found.append(made.tokens.clone())
        return made

    monkeypatch.setattr(ModelDrafter, "propose", record)
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", mostly_slow(CONFIGS, "llava", "qwen2_vl"))
def test_the_drafter_goes_on_from_the_text_of_each_row(name: str, drafts: list[Tensor]) -> None:
    model, drafter, seen = shared_vlm(name), build_drafter(), list[Tensor]()
    inputs = draw_prompts(name, model, (2, 0, 1))
    hook = drafter.register_forward_pre_hook(
        lambda _model, _args, given: seen.append(given["input_ids"]), with_kwargs=True
    )
    own = model.generate(**inputs, **GREEDY)
    made, _ = answer(model, None, inputs, policy_with(drafter), **GREEDY)
    hook.remove()
    assert torch.equal(made, own)
    made = made[:, -N_NEW:]
    prompts = [ids for ids in seen if ids.shape[1] > 2]  # later passes have tokens of its own
    assert prompts and not any(bool((ids == IMAGE).any()) for ids in prompts)
    for row, ids in enumerate(inputs["input_ids"]):
        text = ids[inputs["attention_mask"][row].bool() & (ids != IMAGE)]
        first = drafter.generate(text[None], max_new_tokens=WINDOW - 1, do_sample=False)
        assert torch.equal(drafts[0][row], first[0, len(text) :])
        # the second pass, after what the first left of the drafts and one token more
        n_accepted = int((made[row, : WINDOW - 1] == drafts[0][row]).long().cumprod(0).sum())
        text = torch.cat([text, made[row, : n_accepted + 1]])
        second = drafter.generate(text[None], max_new_tokens=WINDOW - 1, do_sample=False)
        assert torch.equal(drafts[1][row], second[0, len(text) :])
