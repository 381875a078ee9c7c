"""Repetition rules over a window equal single positions bitwise, and give the plain tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.pipelines.hosts.logits.processor_chain import LogitsChain
from mmaccel.pipelines.hosts.logits.processor_support import find_kind, find_window_form
from tests.fixtures.lanes import every
from tests.fixtures.tiny_lms import EOS, PAD, VOCAB, build_lm, left_padded

ROWS = [[5, 6], [4, 5, 6, 7, 7], [9, 8, 7]]
PROMPTS = left_padded(ROWS)
WIDTH = 5  # of the padded prompts
LENGTH = 18
ENDS = [EOS, 12, 20]  # several, so that rows end at different slots


def _processors() -> dict[str, Any]:
    from transformers import RepetitionPenaltyLogitsProcessor

    sampling = mmaccel.RepetitionAwareSampling
    return {
        "aware": sampling(top_k=6, start=WIDTH),
        "aware, prompt counts": sampling(top_p=0.95, window=4, share=0.5),
        "aware, others": sampling(top_p=0.9, window=7, share=0.2, start=WIDTH, redraw="others"),
        "penalty, last 3": mmaccel.WindowedRepetitionPenalty(1.8, 3),
        "penalty, last 64": mmaccel.WindowedRepetitionPenalty(1.3, 64),
        "transformers": RepetitionPenaltyLogitsProcessor(1.6),
        "transformers, made": RepetitionPenaltyLogitsProcessor(1.6, prompt_ignore_length=WIDTH),
        "transformers, reward": RepetitionPenaltyLogitsProcessor(0.8),
    }


def _scene(width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, int]:
    """Scores with ties and -inf, tokens that repeat, columns of rows at several slots."""
    random, origin = torch.Generator().manual_seed(seed), WIDTH + 2
    scores = 2 * torch.randn(3, width, VOCAB, generator=random)
    scores[:, :, 30:33] = float("-inf")
    scores[:, :, 10] = scores[:, :, 11]
    line = torch.randint(0, 9, (3, origin + 12), generator=random)
    line[:, :origin] = -1
    columns = origin + torch.tensor([[0], [4], [2]]) + torch.arange(width)
    return scores, line, columns, origin


def _run(model: Any, policy: Any, processor: Any, seed: Any = None, **options: Any) -> Tensor:
    options = {"max_new_tokens": LENGTH, "eos_token_id": ENDS} | options
    with mmaccel.attach(model, policy, seed=seed, strict=True):
        return model.generate(**PROMPTS, logits_processor=[processor], **options)


@pytest.mark.parametrize("name", _processors())
@pytest.mark.parametrize("width", [1, 8])
def test_a_window_gives_the_bits_of_its_positions(name: str, width: int) -> None:
    processor = _processors()[name]
    scores, line, columns, origin = _scene(width, seed=width)
    assert find_kind(processor) == "window"
    found, expected = (
        LogitsChain([(processor, kind)], PROMPTS["input_ids"], origin)(scores, line, columns)
        for kind in ("window", "prefix")
    )
    assert torch.equal(found, expected) and not torch.equal(found, scores)


@pytest.mark.parametrize("window", [1, 11, 12, 500])
def test_the_windowed_penalty_is_transformers_on_the_last_tokens(window: int) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    random = torch.Generator().manual_seed(window)
    ids = torch.randint(0, VOCAB, (3, 12), generator=random)
    scores = 3 * torch.randn(3, VOCAB, generator=random)
    found = mmaccel.WindowedRepetitionPenalty(1.7, window)(ids, scores)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(ids[:, -window:], scores)
    assert torch.equal(found, expected)
    whole = RepetitionPenaltyLogitsProcessor(1.7)(ids, scores)
    assert torch.equal(found, whole) == (window >= 12)


def test_ids_outside_the_vocabulary_do_not_count() -> None:
    scores = torch.randn(1, 4, generator=torch.Generator().manual_seed(0))
    for processor in (
        mmaccel.WindowedRepetitionPenalty(2.0, 3),
        mmaccel.RepetitionAwareSampling(top_p=1.0, window=3),
    ):
        found = processor(torch.tensor([[2, 7, -1, 4]]), scores)
        assert torch.equal(found, processor(torch.zeros(1, 0, dtype=torch.int64), scores))
        assert not torch.equal(found, processor(torch.tensor([[7, -1, 2]]), scores))


@pytest.mark.parametrize("name", every(4, _processors()))
def test_greedy_is_plain_greedy(name: str) -> None:
    model, processor = build_lm("llama"), _processors()[name]
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=LENGTH, eos_token_id=ENDS)
    plain = model.generate(**PROMPTS, logits_processor=[processor], **options)
    assert not torch.equal(plain, model.generate(**PROMPTS, **options))
    for window in (1, 3, 8):
        ours = _run(model, mmaccel.Jacobi(window=window), processor, do_sample=False)
        assert torch.equal(ours, plain), window


@pytest.mark.parametrize("name", every(3, _processors()))
def test_sampled_jacobi_is_the_reference(name: str) -> None:
    model, processor = build_lm("llama"), _processors()[name]
    options: dict[str, Any] = dict(do_sample=True, top_k=0, seed=5)
    reference = _run(model, mmaccel.Autoregressive(), processor, **options)
    ends = {int((row[WIDTH:] != PAD).sum()) for row in reference}
    assert len(ends) > 1  # rows end at different slots
    for window in (1, 3, 8):
        ours = _run(model, mmaccel.Jacobi(window=window), processor, **options)
        assert torch.equal(ours, reference), window


@pytest.mark.parametrize("name", _processors())
def test_window_forms_never_synchronise(name: str) -> None:
    """Tensors without data raise as soon as their values are read."""
    form = find_window_form(_processors()[name])
    assert form is not None
    scores, line, columns, _ = _scene(4)
    answer = form(scores.to("meta"), line.to("meta"), columns.to("meta"))
    assert answer.shape == scores.shape and answer.dtype == scores.dtype
    with pytest.raises(RuntimeError):
        bool(answer.any())


class _Child(mmaccel.WindowedRepetitionPenalty):
    """Does something else than its parent, and inherits its form for windows."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores - 1


@dataclasses.dataclass(frozen=True)
class _Frozen:
    shift: float = 1.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.shift * (input_ids == 7).sum(1, keepdim=True)


def test_other_classes_are_called_position_by_position() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    rows = RepetitionPenaltyLogitsProcessor(1.5)
    rows.prompt_ignore_length = torch.tensor([5, 4, 5])  # one for each row
    for processor in (_Child(1.5, 3), _Frozen(), rows):
        assert find_kind(processor, assume_stateless=True) == "prefix"


@pytest.mark.parametrize("gap", [60.0, 95.0, 120.0])
@pytest.mark.parametrize("redraw", ["all", "others"])
def test_a_token_far_ahead_of_the_others_leaves_a_distribution(gap: float, redraw: Any) -> None:
    """Token 0 is repeated; another is drawn as long as its probability does not underflow."""
    rule = mmaccel.RepetitionAwareSampling(redraw=redraw)
    distribution = rule(torch.tensor([[0]]), torch.tensor([[gap, 0.0, -2.0]])).exp()
    assert bool(distribution.isfinite().all()) and float(distribution.sum()) == pytest.approx(
        1, abs=1e-5
    )
    if redraw == "others" and gap < 80:
        assert distribution[0].tolist() == pytest.approx(
            [0, *torch.tensor([0.0, -2.0]).softmax(0).tolist()]
        )
