"""Dia under window policies: delays of each book, an end that others follow, its own guidance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.contracts import Layout
from mmaccel.errors import AttachError
from mmaccel.evaluation.exactness.g_test import g_test
from mmaccel.pipelines.delay.dia import DiaGuidance, DiaRules, DiaSteps
from tests.delay.models import DIA_DELAYS, DIA_END, MASK, TEXT, delay_prompt, make_dia

BOOKS = len(DIA_DELAYS)
POLICIES = [
    mmaccel.Autoregressive(),
    mmaccel.Jacobi(window=3),
    mmaccel.Jacobi(window=11, drafts="previous-frame"),
]
EXACT = [mmaccel.SpeculativeJacobi(window=8), mmaccel.Speculative(window=4, drafts="ngram")]
EMPTY = delay_prompt(torch.zeros(3, 0, BOOKS, dtype=torch.int64))
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "guided": {"guidance_scale": 3.0, "top_k": 5},
    "guided without a limit": {"guidance_scale": 3.0, "top_k": None},
    "begun": delay_prompt(torch.arange(3 * 2 * BOOKS).view(3, 2, BOOKS) % 16),
    "without delays": {"decoder_input_ids": None, "decoder_attention_mask": None},
    "cut": {"max_length": 4},
}


def speak(model: Any, **options: Any) -> Tensor:
    given = {"input_ids": TEXT.flip(1), "attention_mask": MASK.flip(1), "max_length": 10}
    given = {k: v for k, v in (given | EMPTY | options).items() if v is not None}
    made: Tensor = model.generate(**given)
    return made


def attached(model: Any, policy: Any, seed: Any = 3, **options: Any) -> Any:
    with mmaccel.attach(model, policy, seed=seed, strict=True) as handle:
        made = speak(model, **options)
    assert handle.stats is not None and not handle.stats.fallbacks
    return made, handle.stats


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=str)
def dia(request: pytest.FixtureRequest) -> Any:
    return make_dia().to(request.param)


@pytest.fixture(scope="module")
def single() -> Any:
    return make_dia()


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS.keys())
def test_greedy_codes_are_those_of_the_models_own_loop(dia: Any, options: Any) -> None:
    own = speak(dia, **options)
    for policy in (POLICIES[2], EXACT[0]):
        assert torch.equal(attached(dia, policy, **options)[0], own)
    assert torch.equal(speak(dia, **options), own)  # detached


@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[1], EXACT[1]], ids=repr)
def test_greedy_codes_under_other_policies(single: Any, policy: Any) -> None:
    assert torch.equal(attached(single, policy)[0], speak(single))


def test_rows_end_at_steps_of_their_own(single: Any) -> None:
    """What the tests above compare has ends that differ, each book's behind its delay."""
    ends = (speak(single) == DIA_END).long().argmax(1)  # [B, K]
    assert len(set(ends[:, 0].tolist())) > 1
    assert torch.equal(ends - ends[:, :1], torch.tensor(DIA_DELAYS).expand(len(ends), -1))


@pytest.mark.parametrize("options", list(CALLS.values())[:2], ids=list(CALLS)[:2])
def test_sampled_codes_are_the_same_under_all_bitwise_policies(dia: Any, options: Any) -> None:
    options = options | {"do_sample": True, "temperature": 1.2, "top_p": 0.95}
    own, stats = attached(dia, POLICIES[0], **options)
    for policy in POLICIES[1:]:
        made, cost = attached(dia, policy, **options)
        assert torch.equal(made, own) and cost.passes < stats.passes
    assert cost.passes <= own.shape[1]  # a step each, and one
    assert not torch.equal(attached(dia, POLICIES[0], seed=4, **options)[0], own)


def test_a_row_does_not_depend_on_the_batch(single: Any) -> None:
    options = {"do_sample": True, "guidance_scale": 2.0}
    several, _ = attached(single, POLICIES[2], seed=[5, 6, 7], **options)
    for row in range(3):
        one = slice(row, row + 1)
        own = {"input_ids": TEXT.flip(1)[one], "attention_mask": MASK.flip(1)[one]}
        own |= {name: value[one] for name, value in EMPTY.items()}
        alone, _ = attached(single, POLICIES[2], seed=[5 + row], **options, **own)
        assert torch.equal(alone[0], several[row, : alone.shape[1]])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a warper behind the filter": ({"do_sample": True, "typical_p": 0.5}, "behind Dia's filter"),
    "guidance of few codes": ({"guidance_scale": 3.0, "top_k": 2}, "guidance of . codes or fewer"),
    "no text": ({"attention_mask": MASK * torch.tensor([[1], [1], [0]])}, "a row without text"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    "a penalty": ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor, which reads"),
    "another end": ({"eos_token_id": [DIA_END, 3]}, "end tokens other than 16"),
    "sounds of other lengths": (
        {"decoder_attention_mask": EMPTY["decoder_attention_mask"] * torch.tensor([[0], [1], [1]])},
        "prompts of sound of different lengths",
    ),
}


@pytest.mark.parametrize("options, says", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused(single: Any, options: Any, says: str) -> None:
    with mmaccel.attach(single, "jacobi", strict=True):
        with pytest.raises(AttachError, match=says):
            speak(single, **options)


def test_sounds_have_the_models_distribution() -> None:
    """Against the model's own scores, after all of its processors, along what it draws itself."""
    delays = (0, 1)
    model = make_dia(0.3, 3, delays).double()
    rows = 2000
    text = {"input_ids": TEXT[1:2].expand(rows, -1), "attention_mask": MASK[1:2].expand(rows, -1)}
    options = text | delay_prompt(torch.zeros(rows, 0, 2, dtype=torch.int64), 3, delays)
    options |= {"max_length": 4, "do_sample": True, "guidance_scale": 1.5, "top_k": 6}
    options |= {"temperature": 3.0}
    torch.manual_seed(0)
    own: Any = speak(model, **options, return_dict_in_generate=True, output_scores=True)
    drawn = own.sequences
    chances = torch.ones(rows, dtype=torch.float64)
    ended = torch.zeros(rows, 2, dtype=torch.bool)
    for step, scores in enumerate(own.scores, 1):
        for book, delay in enumerate(delays):
            code = drawn[:, step, book]
            is_free = ~ended[:, book] & (step > delay)
            chance = scores.view(rows, 2, -1)[:, book].double().softmax(-1)
            chances *= torch.where(is_free, chance.gather(1, code[:, None])[:, 0], 1.0)
            ended[:, book] |= code == 3
    known, where = torch.unique(drawn.flatten(1), dim=0, return_inverse=True)
    expected = torch.zeros(len(known), dtype=torch.float64).scatter_(0, where, chances)
    assert float(expected.sum()) > 0.999 and len(known) > 15
    for policy in (
        mmaccel.SpeculativeJacobi(window=4),
        mmaccel.Speculative(window=3, drafts="ngram"),
    ):
        made, _ = attached(model, policy, seed=11, **options)
        found = (made.flatten(1)[:, None] == known).all(-1)
        counts = found.sum(0)
        assert int(counts.sum()) > rows * 0.997
        result = g_test(counts, expected / expected.sum())
        assert result.p_value > 1e-3


def test_rows_that_share_an_end_are_seen(single: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = speak(single)
    find = DiaRules.find_ends

    def leak(self: DiaRules, tokens: Tensor, slots: Tensor) -> Tensor:
        return find(self, tokens, slots).amin(0).expand_as(slots)

    monkeypatch.setattr(DiaRules, "find_ends", leak)
    assert not torch.equal(attached(single, POLICIES[2])[0], own)


def test_an_end_among_drafts_that_is_not_seen(single: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = speak(single)
    find = DiaRules.find_ends

    def begin(self: DiaRules, tokens: Tensor, slots: Tensor) -> Tensor:
        return find(self, tokens, slots[:, :1]).expand_as(slots)

    monkeypatch.setattr(DiaRules, "find_ends", begin)
    assert torch.equal(attached(single, POLICIES[0])[0], own)  # where every pass decides one code
    assert not torch.equal(attached(single, POLICIES[2])[0], own)


def test_guidance_and_its_limit_exchanged_are_seen(
    single: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"guidance_scale": 3.0, "top_k": 5}
    own = speak(single, **options)
    assert torch.equal(attached(single, "jacobi", **options)[0], own)

    def exchanged(
        self: DiaGuidance, logits: Tensor, branches: int, slots: Tensor, layout: Layout | None
    ) -> Tensor:
        conditional, unconditional = logits[..., :-1].float().chunk(2)
        chosen = conditional.topk(self.guidance_top_k or 1, dim=-1).indices
        is_out = torch.ones_like(conditional, dtype=torch.bool).scatter(-1, chosen, False)
        guided = conditional + (conditional - unconditional) * self.guidance_scale
        guided = guided.masked_fill(is_out, -torch.inf)
        return torch.nn.functional.pad(guided, (0, 1), value=-torch.inf)

    monkeypatch.setattr(DiaGuidance, "to_model_scores", exchanged)
    assert not torch.equal(attached(single, "jacobi", **options)[0], own)


def test_books_that_are_off_by_one_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = DiaSteps.forward

    def shifted(self: DiaSteps, codes: Tensor, first: Tensor) -> Tensor:
        return forward(self, codes.roll(1, 2), first)

    monkeypatch.setattr(DiaSteps, "forward", shifted)
    assert "agree with its own pass" in mmaccel.supports(make_dia()).reason
