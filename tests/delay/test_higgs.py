"""Higgs Audio v2 under window policies: a prompt of text and sound, delays, ends step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import AttachError
from mmaccel.evaluation.exactness.g_test import g_test
from mmaccel.pipelines.delay.higgs import HiggsRules, HiggsSteps
from tests.delay.models import (
    AUDIO,
    AUDIO_BEGIN,
    AUDIO_DELAY,
    HIGGS_BOOKS,
    HIGGS_END,
    TEXT_END,
    make_higgs,
)

POLICIES = [
    mmaccel.Autoregressive(),
    mmaccel.Jacobi(window=3),
    mmaccel.Jacobi(window=11, drafts="previous-frame"),
]
EXACT = [mmaccel.SpeculativeJacobi(window=8), mmaccel.Speculative(window=4, drafts="ngram")]
IDS = torch.tensor([[19, 19, 5, 7, AUDIO_BEGIN], [3, 4, 9, 2, AUDIO_BEGIN]])
CLONE = torch.tensor([
    [19, 19, 5, AUDIO, AUDIO, AUDIO, 7, 3, 6, AUDIO_BEGIN],
    [3, 4, 9, AUDIO, AUDIO, AUDIO, AUDIO_DELAY, 2, 7, AUDIO_BEGIN],
])  # fmt: skip
CALLS: dict[str, dict[str, Any]] = {
    "text": {},
    "a voice": {
        "input_ids": CLONE,
        "attention_mask": CLONE != 19,
        "audio_input_ids": torch.arange(2 * 4 * HIGGS_BOOKS).view(2, 4, -1) % 12,
        "audio_input_ids_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool(),
    },
    "without a begin": {"input_ids": IDS[:, :-1], "attention_mask": IDS[:, :-1] != 19},
    "begun": {
        "input_ids": torch.cat([IDS, torch.full((2, 2), AUDIO)], 1),
        "attention_mask": torch.cat([IDS, IDS[:, -2:]], 1) != 19,
        "audio_input_ids": torch.tensor([[[12, 12, 12], [3, 12, 12]]] * 2),
        "audio_input_ids_mask": torch.ones(2, 2, dtype=torch.bool),
    },
    "cut": {"max_new_tokens": 4},
}


def speak(model: Any, **options: Any) -> Tensor:
    given = {"input_ids": IDS, "attention_mask": IDS != 19, "max_new_tokens": 12}
    made: Tensor = model.generate(**given | options)
    return made


def attached(model: Any, policy: Any, seed: Any = 3, **options: Any) -> Any:
    with mmaccel.attach(model, policy, seed=seed, strict=True) as handle:
        made = speak(model, **options)
    assert handle.stats is not None and not handle.stats.fallbacks
    return made, handle.stats


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=str)
def higgs(request: pytest.FixtureRequest) -> Any:
    return make_higgs().to(request.param)


@pytest.fixture(scope="module")
def single() -> Any:
    return make_higgs()


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS.keys())
def test_greedy_codes_are_those_of_the_models_own_loop(higgs: Any, options: Any) -> None:
    own = speak(higgs, **options)
    for policy in (POLICIES[2], EXACT[0]):
        assert torch.equal(attached(higgs, policy, **options)[0], own)
    assert torch.equal(speak(higgs, **options), own)  # detached


@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[1], EXACT[1]], ids=repr)
def test_greedy_codes_under_other_policies(single: Any, policy: Any) -> None:
    assert torch.equal(attached(single, policy)[0], speak(single))


def test_rows_end_at_steps_of_their_own(single: Any) -> None:
    """What the tests above compare has a row that ends, book after book, and one that does not."""
    ends = speak(single) == HIGGS_END
    assert not ends[0].any() and ends[1, -1].all()
    first = ends[1].long().argmax(0)
    assert torch.equal(first[1:] >= first[:-1], torch.ones(HIGGS_BOOKS - 1, dtype=torch.bool))


def test_sampled_codes_are_the_same_under_all_bitwise_policies(higgs: Any) -> None:
    options = {"do_sample": True, "temperature": 1.2, "top_k": 9, "top_p": 0.95}
    own, stats = attached(higgs, POLICIES[0], **options)
    for policy in POLICIES[1:]:
        made, cost = attached(higgs, policy, **options)
        assert torch.equal(made, own) and cost.passes < stats.passes
    assert cost.passes <= own.shape[1]
    assert not torch.equal(attached(higgs, POLICIES[0], seed=4, **options)[0], own)


def test_a_row_does_not_depend_on_the_batch(single: Any) -> None:
    several, _ = attached(single, POLICIES[2], seed=[5, 6], do_sample=True)
    for row, n_padding in enumerate((2, 0)):
        ids = IDS[row : row + 1, n_padding:]
        own = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": True}
        alone, _ = attached(single, POLICIES[2], seed=[5 + row], **own)
        assert torch.equal(alone[0], several[row, : alone.shape[1]])


def test_a_returned_object_has_ids_and_codes(single: Any) -> None:
    options = {"return_dict_in_generate": True}
    own: Any = speak(single, **options)
    made, _ = attached(single, POLICIES[2], **options)
    assert torch.equal(made.sequences, own.sequences)
    assert torch.equal(made.audio_sequences, own.audio_sequences)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "a short prompt": (
        {"input_ids": torch.tensor([[3, AUDIO_BEGIN]]), "attention_mask": None},
        "fewer ids than codebooks",
    ),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    "repaired scores": ({"remove_invalid_values": True}, "other than temperature"),
    "another end": ({"eos_token_id": 2}, f"end tokens without {TEXT_END}"),
    "one step": ({"max_new_tokens": 1}, "nothing is generated"),
    "holes": ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1]] * 2)}, "attention mask"),
    "a sound that ends": (
        {"input_ids": torch.tensor([[3, AUDIO, AUDIO_DELAY]]), "attention_mask": None},
        "begun to end",
    ),
    "rows that began apart": (
        {"input_ids": torch.tensor([[3, AUDIO_BEGIN, 4], [3, 4, AUDIO_BEGIN]]),
         "attention_mask": None},
        "begun at different steps",
    ),
}  # fmt: skip


@pytest.mark.parametrize("options, says", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused(single: Any, options: Any, says: str) -> None:
    with mmaccel.attach(single, "jacobi", strict=True):
        with pytest.raises(AttachError, match=says):
            speak(single, **options)


def test_rotations_that_change_with_the_length_are_refused() -> None:
    model = make_higgs()
    model.config.rope_parameters["rope_type"] = "dynamic"
    assert "change with the length" in mmaccel.supports(model).reason


def test_sounds_have_the_models_distribution() -> None:
    """Against the model's own scores, after all of its processors, along what it draws itself."""
    model = make_higgs(1.0, 1, 2).double()
    rows = 2000
    ids = IDS[1:, :].expand(rows, -1)
    options = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 4}
    options |= {"do_sample": True, "top_k": 0, "temperature": 1.5}
    torch.manual_seed(0)
    own: Any = speak(model, **options, return_dict_in_generate=True, output_scores=True)
    drawn = own.audio_sequences
    scores = torch.stack(own.scores, 1).double().softmax(-1)  # [B, S, K, V]
    chances = scores.gather(3, drawn[..., None])[..., 0]
    over = (drawn == 2).all(2).long().cumsum(1) - (drawn == 2).all(2).long() > 0  # [B, S]
    chances = chances.masked_fill(over[..., None], 1.0).flatten(1).prod(1)
    known, where = torch.unique(drawn.flatten(1), dim=0, return_inverse=True)
    expected = torch.zeros(len(known), dtype=torch.float64).scatter_(0, where, chances)
    assert float(expected.sum()) > 0.99 and len(known) > 15
    for policy in (
        mmaccel.SpeculativeJacobi(window=4),
        mmaccel.Speculative(window=3, drafts="ngram"),
    ):
        made, _ = attached(model, policy, seed=11, **options)
        counts = (made.flatten(1)[:, None] == known).all(-1).sum(0)
        assert int(counts.sum()) > rows * 0.98
        assert g_test(counts, expected / expected.sum()).p_value > 1e-3


def test_rows_that_share_an_end_are_seen(single: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = speak(single)
    find = HiggsRules.find_ends

    def leak(self: HiggsRules, tokens: Tensor, step: Tensor) -> Tensor:
        return find(self, tokens, step).amin(0).expand_as(step)

    monkeypatch.setattr(HiggsRules, "find_ends", leak)
    assert not torch.equal(attached(single, POLICIES[2])[0], own)


def test_an_end_among_drafts_that_is_not_seen(single: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = speak(single)
    find = HiggsRules.find_ends

    def begin(self: HiggsRules, tokens: Tensor, step: Tensor) -> Tensor:
        return find(self, tokens, step[:, :1]).expand_as(step)

    monkeypatch.setattr(HiggsRules, "find_ends", begin)
    assert torch.equal(attached(single, POLICIES[0])[0], own)  # where every pass decides one code
    assert not torch.equal(attached(single, POLICIES[2])[0], own)


def test_books_that_are_off_by_one_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = HiggsSteps.forward

    def shifted(self: HiggsSteps, codes: Tensor, first: Tensor) -> Tensor:
        return forward(self, codes.roll(1, 2), first)

    monkeypatch.setattr(HiggsSteps, "forward", shifted)
    assert "agree with its own pass" in mmaccel.supports(make_higgs()).reason
