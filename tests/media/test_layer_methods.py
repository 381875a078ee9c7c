"""Methods of a model's layers in calls of speech and video, whose rows end one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.errors import OptionError
from tests.fixtures.shared import media_pipe
from tests.fixtures.speech import FAMILIES, SECONDS, TEXTS

SEEDS = [3, 4, 5]
EVICTING = mmaccel.SnapKV(budget=6, window=2)


def speak(family: str, rows: slice, **options: Any) -> Any:
    seconds = SECONDS[family]
    return media_pipe(family)(
        TEXTS[rows], seed=SEEDS[rows], max_seconds=seconds, temperature=1.0, top_k=0, **options
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_utterances_under_eviction_are_those_of_each_text_alone(family: str) -> None:
    jacobi = mmaccel.Jacobi(window=5)
    together = speak(family, slice(3), policy=jacobi, kv_cache=EVICTING)
    assert together.stats.exactness == "relaxed"
    assert "SnapKV(budget=6" in together.stats.reference
    whole = speak(family, slice(3), policy=jacobi)
    assert whole.stats.exactness == "bitwise" and not whole.stats.reference
    lengths = {len(each.tokens) for each in together.utterances}
    assert len(lengths) > 1  # some rows go on behind others
    for k, made in enumerate(together.utterances):
        alone = speak(family, slice(k, k + 1), policy="autoregressive", kv_cache=EVICTING)
        assert torch.equal(alone[0].tokens, made.tokens)
    pairs = zip(together.utterances, whole.utterances, strict=True)
    assert any(not torch.equal(made.tokens, plain.tokens) for made, plain in pairs)


def test_rows_that_begin_later_are_refused_before_a_pass() -> None:
    match = "kv_cache: expected rows that begin together, received 3"
    with pytest.raises(OptionError, match=match):
        speak("llasa", slice(3), kv_cache=EVICTING, batch_size=2)
