"""Warpers at the end of a call's processors become sampling parameters of the same distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import mmaccel
from mmaccel import Jacobi, SamplingParams
from mmaccel.pipelines.hosts.attach import generate as generate_service
from mmaccel.pipelines.hosts.logits.processor_chain import take_warpers
from tests.fixtures.tiny_lms import VOCAB, build_lm

WARM, K, P, M = (
    TemperatureLogitsWarper(0.7), TopKLogitsWarper(9), TopPLogitsWarper(0.8), MinPLogitsWarper(0.1),
)  # fmt: skip


H, E = TopHLogitsWarper(0.7), EtaLogitsWarper(0.25)


Child = type("TopKLogitsWarper", (TopKLogitsWarper,), {})  # same name, not transformers' class


def flat(*processors: Any) -> list[tuple[Any, str]]:
    return [(processor, "flat") for processor in processors]


@pytest.mark.parametrize(
    ("processors", "n_left", "taken"),
    [
        ((), 0, {}),
        ((WARM, K, P, M), 0, {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1}),
        ((K,), 0, {"top_k": 9}),
        ((WARM, H, K, E), 0, {"temperature": 0.7, "top_h": 0.7, "top_k": 9, "eta_cutoff": 0.25}),
        ((K, H), 1, {"top_h": 0.7}),
        ((EtaLogitsWarper(0.25, min_tokens_to_keep=2),), 1, {}),
        ((RepetitionPenaltyLogitsProcessor(1.2), WARM, P), 1, {"temperature": 0.7, "top_p": 0.8}),
        ((P, WARM), 1, {"temperature": 0.7}),  # top-p before temperature is another distribution
        ((K, TopKLogitsWarper(4)), 1, {"top_k": 4}),
        ((WARM, RepetitionPenaltyLogitsProcessor(1.2)), 2, {}),
        ((Child(5),), 1, {}),
        ((TopKLogitsWarper(9, filter_value=-5.0),), 1, {}),
        ((TopPLogitsWarper(0.5, min_tokens_to_keep=3),), 1, {}),
        ((TopPLogitsWarper(0.0),), 1, {}),
    ],
)
def test_which_warpers_are_turned(processors: Any, n_left: int, taken: dict[str, Any]) -> None:
    rest, options = take_warpers(flat(*processors), True)
    assert rest == flat(*processors)[:n_left] and options == taken


def test_greedy_calls_keep_their_warpers() -> None:
    assert take_warpers(flat(WARM, K), False) == (flat(WARM, K), {})


def by_both(chosen: Sequence[Any], scores: Tensor) -> tuple[Tensor, Tensor]:
    """Scores `[N, V]` under `SamplingParams` and under transformers' list of processors."""
    expected = LogitsProcessorList(chosen)(torch.zeros(200, 1, dtype=torch.int64), scores.clone())
    _, options = take_warpers(flat(*chosen), True)
    slots = torch.zeros(200, 1, dtype=torch.int64)
    found = SamplingParams(**options).apply(scores[:, None], 1, slots, slots + 1, slots, None)
    return found[:, 0], expected


@pytest.mark.parametrize("n_of", range(1, 16))
def test_sampling_params_give_the_same_distribution(n_of: int) -> None:
    """Every selection of the four, on random scores and on scores with ties at the k-th."""
    chosen = [w for bit, w in enumerate((WARM, K, P, M)) if n_of >> bit & 1]
    scores = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(n_of)) * 3
    scores[:50] = scores[:50].round()
    found, expected = by_both(chosen, scores)
    if P not in chosen:
        torch.testing.assert_close(found.softmax(-1), expected.softmax(-1), rtol=1e-6, atol=1e-7)
        return
    # tied tokens at top-p's limit: either keeps some of them; what is kept has the same scores
    kept, theirs = found.isfinite(), expected.isfinite()
    assert torch.equal(kept.sum(-1), theirs.sum(-1))
    lowest = [
        s.masked_fill(~k, torch.inf).sort(-1).values for s, k in ((found, kept), (expected, theirs))
    ]
    assert torch.equal(*lowest)


@pytest.mark.parametrize("chosen", [(H,), (E,), (WARM, H, K, P, E)], ids=len)
def test_rules_of_entropy_give_the_same_distribution(chosen: Any) -> None:
    scores = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    found, expected = by_both(chosen, scores)
    assert 1 < int(expected.isfinite().sum(-1).max()) < VOCAB
    torch.testing.assert_close(found.softmax(-1), expected.softmax(-1), rtol=1e-6, atol=1e-7)


def test_an_ordinary_sampled_call_has_no_processor_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """So its passes can be captured: temperature, top-k and top-p of a generation config."""
    seen: list[SamplingParams] = []
    real = generate_service.Engine.prepare

    def prepare(self: Any, *args: Any, **options: Any) -> None:
        seen.append(args[-1])
        real(self, *args, **options)

    monkeypatch.setattr(generate_service.Engine, "prepare", prepare)
    model = build_lm("llama")
    with mmaccel.attach(model, Jacobi(window=4), seed=1):
        ids = torch.tensor([[1, 2]])
        options = {"do_sample": True, "max_new_tokens": 4}
        model.generate(ids, temperature=0.8, top_k=7, top_p=0.9, **options)
        model.generate(ids, repetition_penalty=1.3, top_k=7, **options)
    assert (seen[0].temperature, seen[0].top_k, seen[0].top_p) == (0.8, 7, 0.9)
    assert seen[0].processor is None
    assert seen[1].processor is not None and seen[1].top_k == 7
