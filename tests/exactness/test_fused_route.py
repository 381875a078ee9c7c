"""Samples of both routes have the distribution that the model's own logits give.

That windows, batches and drafts change no token within the fused route is proved where other suites
over decoders of transformers take the fixture `fused`, and in `tests/matrix/test_batching.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

import mmaccel
from tests.fixtures.enumerated import draw_enumerated
from tests.fixtures.fused_lms import build_decoder


@pytest.mark.parametrize(
    "policy",
    [
        mmaccel.Jacobi(3, "random"),
        mmaccel.SpeculativeJacobi(3, "maximal"),
        mmaccel.Speculative(3),
    ],
    ids=str,
)
def test_samples_have_the_distribution_of_the_models_own_logits(policy: Any, fused: bool) -> None:
    model = build_decoder("llama with biases", vocab_size=5, bos_token_id=None, eos_token_id=None)
    p_value, stats = draw_enumerated(model, policy, n=30_000, fused=fused)
    assert p_value > 1e-4
    assert stats.route == ("fused" if fused else "model")
