"""The logits chain against transformers' own list, called position by position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import (
    EntropyTemperature,
    FrustratinglySimple,
    RepetitionAwareSampling,
    TopNSigma,
    WindowedRepetitionPenalty,
)
from mmaccel.pipelines.hosts.logits.processor_chain import LogGuidance, LogitsChain
from mmaccel.pipelines.hosts.logits.processor_support import find_kind

VOCAB, WINDOW = 23, 5
PROMPT = torch.tensor([[0, 0, 5, 6], [4, 5, 6, 7], [0, 9, 8, 7]])
ORIGIN = 6  # wider than the prompt, as with a long negative prompt


def _processors() -> dict[str, Any]:
    from transformers.generation import logits_process as lp

    eos = torch.tensor([3])
    return {
        "temperature": lp.TemperatureLogitsWarper(0.7),
        "top_k": lp.TopKLogitsWarper(4),
        "top_p": lp.TopPLogitsWarper(0.6),
        "top_h": lp.TopHLogitsWarper(0.5),
        "min_p": lp.MinPLogitsWarper(0.2),
        "typical": lp.TypicalLogitsWarper(0.5),
        "epsilon": lp.EpsilonLogitsWarper(0.05),
        "eta": lp.EtaLogitsWarper(0.3),
        "suppress": lp.SuppressTokensLogitsProcessor([1, 2]),
        "clean": lp.InfNanRemoveLogitsProcessor(),
        "norm": lp.LogitNormalization(),
        "repetition": lp.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=1),
        "repetition, recent": WindowedRepetitionPenalty(1.5, 3),
        "repetition-aware": RepetitionAwareSampling(window=4, start=1),
        "frustratingly simple": FrustratinglySimple(n=3),
        "top-n-sigma": TopNSigma(1.0),
        "entropy temperature": EntropyTemperature(0.5),
        "encoder repetition": lp.EncoderRepetitionPenaltyLogitsProcessor(1.5, PROMPT),
        "ngram": lp.NoRepeatNGramLogitsProcessor(1),
        "encoder ngram": lp.EncoderNoRepeatNGramLogitsProcessor(1, PROMPT),
        "bad words": lp.NoBadWordsLogitsProcessor([[1], [2, 3]], eos_token_id=eos),
        "bias": lp.SequenceBiasLogitsProcessor({(1,): 2.0, (2, 3): -1.0}),
        "min length": lp.MinLengthLogitsProcessor(8, eos),
        "min new": lp.MinNewTokensLengthLogitsProcessor(4, 3, eos),
        "prefix": lp.PrefixConstrainedLogitsProcessor(
            mmaccel.stateless(lambda row, ids: [row, int(ids[-1]), len(ids)]), 1
        ),
        "forced first": lp.ForcedBOSTokenLogitsProcessor(1),
        "forced last": lp.ForcedEOSTokenLogitsProcessor(9, 3),
        "decay": lp.ExponentialDecayLengthPenalty((2, 1.4), eos, 4),
        "begin": lp.SuppressTokensAtBeginLogitsProcessor([4, 5], 5),
        "watermark": lp.WatermarkLogitsProcessor(VOCAB, "cpu", context_width=2),
    }


def _scene(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, a token buffer and columns of three rows at slots 0, 3 and 2."""
    random = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(3, WINDOW, VOCAB, generator=random)
    line = torch.randint(0, VOCAB, (3, ORIGIN + 12), generator=random)
    line[:, :ORIGIN] = -1  # the chain has its own copy of the prompt
    columns = ORIGIN + torch.tensor([[0], [3], [2]]) + torch.arange(WINDOW)
    return scores, line, columns


def _by_hand(processors: list[Any], scores: Tensor, line: Tensor, columns: Tensor) -> Tensor:
    """One position after the other, all rows of a call with prefixes of that length."""
    from transformers import LogitsProcessorList

    chain, result = LogitsProcessorList(processors), torch.empty_like(scores)
    for row in range(3):
        for w in range(WINDOW):
            end = int(columns[row, w])
            ids = torch.cat([PROMPT, line[:, ORIGIN:end]], 1)
            batch = scores[row, w].repeat(3, 1)
            result[row, w] = chain(ids, batch.clone())[row]
    return result


@pytest.mark.parametrize("name", list(_processors()))
def test_every_processor_gives_its_own_scores(name: str) -> None:
    processor = _processors()[name]
    scores, line, columns = _scene()
    kind = find_kind(processor)
    assert kind in ("flat", "window", "prefix")
    expected = _by_hand([processor], scores, line, columns)
    if name not in ("clean", "forced first"):
        assert not torch.equal(expected, scores)  # it does something here
    before = scores.clone()
    found = LogitsChain([(processor, kind)], PROMPT, ORIGIN)(scores, line, columns)
    assert torch.equal(found, expected) and torch.equal(scores, before)


def test_processors_run_in_order() -> None:
    table = _processors()
    names = ["repetition", "top_k", "ngram", "repetition, recent", "temperature"]
    names += ["repetition-aware", "top_p", "begin", "norm"]
    processors = [table[name] for name in names]
    scores, line, columns = _scene(1)
    kinds = [(one, find_kind(one)) for one in processors]
    found = LogitsChain(kinds, PROMPT, ORIGIN)(scores, line, columns)
    assert torch.equal(found, _by_hand(processors, scores, line, columns))
    other = LogitsChain(kinds[::-1], PROMPT, ORIGIN)(scores, line, columns)
    assert not torch.equal(other, found)


class _Raises:
    """Raises at prefixes that hold a certain token after the prompt."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if bool((input_ids[:, 4:] == self.token).any()):
            raise LookupError(f"token {self.token}")
        return scores + 1


def test_an_error_is_raised_only_if_its_prefix_is_accepted() -> None:
    scores, line, columns = _scene(2)
    line[:, ORIGIN:] = 1
    line[1, ORIGIN + 4] = 9  # a draft of row 1, read by its entries 2, 3 and 4
    chain = LogitsChain([(_Raises(9), "prefix")], PROMPT, ORIGIN)
    found = chain(scores, line, columns)
    expected = scores + 1
    expected[1, 2:] = scores[1, 2:]
    assert torch.equal(found, expected)  # rows 0 and 2 are served
    lengths = torch.tensor([0, 3, 2])
    chain.check(lengths, lengths + torch.tensor([5, 2, 5]))  # row 1 accepts entries 0 and 1
    chain(scores, line, columns)
    with pytest.raises(LookupError, match="token 9"):
        chain.check(lengths, lengths + torch.tensor([1, 3, 1]))


def test_guidance_is_that_of_transformers() -> None:
    from transformers import UnbatchedClassifierFreeGuidanceLogitsProcessor

    random = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 1, VOCAB, generator=random)  # two rows, conditional first

    class Fixed:
        def __call__(self, *_: Any, **__: Any) -> Any:
            out = type("Out", (dict,), {})()
            out.logits = logits[2:]
            return out

    theirs = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.7, Fixed())
    expected = theirs(PROMPT[:2], logits[:2, 0])
    blank = torch.zeros(2, 1, dtype=torch.int64)
    found = LogGuidance(1.7).apply(logits, 2, blank, blank, blank, None)
    assert torch.equal(found[:, 0], expected)


def test_the_cached_suppression_mask_gives_the_same_scores() -> None:
    from transformers import SuppressTokensLogitsProcessor as Suppress

    processor = Suppress([3, 0, 7, 99])  # 99 is no id here
    scores = torch.randn(2, 4, 8)
    scores[0, 1, 2] = float("nan")
    chain = LogitsChain([(processor, "flat")], torch.zeros(2, 1).long(), 1)
    line, columns = torch.zeros(2, 9).long(), torch.arange(1, 5).expand(2, 4)
    before = scores.clone()
    for _ in range(2):
        out = chain(scores, line, columns)
        wanted = processor(torch.zeros(8, 0).long(), scores.flatten(0, 1)).view_as(scores)
        assert torch.equal(out.nan_to_num(5), wanted.nan_to_num(5))
    assert torch.equal(scores.nan_to_num(5), before.nan_to_num(5))
