"""Dia: delays of each book, an end that others follow, its own guidance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmaccel.contracts import Layout
from mmaccel.pipelines.hosts.delay.dia import DiaGuidance
from tests.delay.hosts import (
    NO_SOUND,
    assert_same_distribution,
    is_refused,
    make_dia_host,
    open_host,
)
from tests.delay.models import DIA_DELAYS, DIA_END, MASK, TEXT, delay_prompt


def test_rows_end_at_steps_of_their_own() -> None:
    """What other tests compare has ends that differ, each book's behind its delay."""
    ends = (open_host("dia").call() == DIA_END).long().argmax(1)  # [B, K]
    assert len(set(ends[:, 0].tolist())) > 1
    assert torch.equal(ends - ends[:, :1], torch.tensor(DIA_DELAYS).expand(len(ends), -1))


def _begin_apart() -> dict[str, Any]:
    """A sound of one frame, which in the first row alone has begun."""
    begun = delay_prompt(torch.zeros(3, 1, len(DIA_DELAYS), dtype=torch.int64))
    begun["decoder_input_ids"][1:, 1, 0] = DIA_END + 1
    return begun


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "processes that wait for each other": ({"synced_gpus": True}, "synced_gpus"),
    "a warper behind the filter": ({"do_sample": True, "typical_p": 0.5}, "behind Dia's filter"),
    "guidance of few codes": ({"guidance_scale": 3.0, "top_k": 2}, "guidance of . codes or fewer"),
    "no text": ({"attention_mask": MASK * torch.tensor([[1], [1], [0]])}, "a row without text"),
    "another end": ({"eos_token_id": [DIA_END, 3]}, "end tokens other than 16"),
    "sounds of other lengths": (
        {"decoder_attention_mask": NO_SOUND["decoder_attention_mask"] * torch.eye(3)[:, :1].long()},
        "prompts of sound of different lengths",
    ),
    "sounds that began apart": (_begin_apart(), "rows with different patterns"),
}


def test_processors_in_another_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    host = open_host("dia")
    prepare = host.model._get_logits_processor

    def turn(*args: Any, **options: Any) -> Any:
        found = prepare(*args, **options)
        found.reverse()
        return found

    monkeypatch.setattr(host.model, "_get_logits_processor", turn)
    assert is_refused(host, "processors in another order than Dia's")


@pytest.mark.slow  # that of MusicGen's codes is in the fast lane
@pytest.mark.parametrize(
    "options",
    [{"top_p": 0.7, "top_k": 0}, {"guidance_scale": 1.5, "top_k": 6, "top_p": 0.7}],
    ids=["plain", "guided"],
)
def test_sounds_have_the_models_distribution(options: dict[str, Any]) -> None:
    """Against the model's own scores, after all of its processors, along what it draws itself."""
    codes, delays = 5, (0, 1)
    host = make_dia_host(0.3, codes, delays)
    host.model.double()
    rows = 2000
    text = {"input_ids": TEXT[1:2].expand(rows, -1), "attention_mask": MASK[1:2].expand(rows, -1)}
    sound = delay_prompt(torch.zeros(rows, 0, 2, dtype=torch.int64), codes, delays)
    options = text | sound | {"max_length": 4, "do_sample": True, "temperature": 3.0} | options
    torch.manual_seed(0)
    own = host.call(**options, return_dict_in_generate=True, output_scores=True)
    drawn = own.sequences
    chances = torch.ones(rows, dtype=torch.float64)
    ended = torch.zeros(rows, 2, dtype=torch.bool)
    for step, scores in enumerate(own.scores, 1):
        for book, delay in enumerate(delays):
            code = drawn[:, step, book]
            is_free = ~ended[:, book] & (step > delay)
            chance = scores.view(rows, 2, -1)[:, book].double().softmax(-1)
            chances *= torch.where(is_free, chance.gather(1, code[:, None])[:, 0], 1.0)
            ended[:, book] |= code == codes
    assert_same_distribution(host, options, drawn, chances)


def test_guidance_and_its_limit_exchanged_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"guidance_scale": 3.0, "top_k": 5}
    host = open_host("dia")
    own = host.call(**options)
    assert torch.equal(host.attached("jacobi", **options)[0], own)

    def exchanged(
        self: DiaGuidance, logits: torch.Tensor, branches: int, slots: torch.Tensor, layout: Layout
    ) -> torch.Tensor:
        conditional, unconditional = logits[..., :-1].float().chunk(2)
        chosen = conditional.topk(self.guidance_top_k or 1, dim=-1).indices
        is_out = torch.ones_like(conditional, dtype=torch.bool).scatter(-1, chosen, False)
        guided = conditional + (conditional - unconditional) * self.guidance_scale
        guided = guided.masked_fill(is_out, -torch.inf)
        return torch.nn.functional.pad(guided, (0, 1), value=-torch.inf)

    monkeypatch.setattr(DiaGuidance, "to_model_scores", exchanged)
    assert not torch.equal(host.attached("jacobi", **options)[0], own)
