"""The distribution of next-scale decoding, of a toy whose images of sides 1 and 2 can all be
enumerated, and a bug that the proof must reject.
"""

from __future__ import annotations

from typing import Any

import pytest

from mmaccel import NextScale, Stepwise
from mmaccel.evaluation.exactness.g_test import power
from mmaccel.evaluation.exactness.reference_models import sample_distribution
from mmaccel.samplers.canvas.scale_pass import ScalePass

SAMPLES, LEVEL = 5_000, 1e-3


@pytest.mark.parametrize("policy", [NextScale(), Stepwise()], ids=repr)
def test_images_have_the_toys_distribution(policy: Any) -> None:
    test = sample_distribution(policy, "canvas", SAMPLES)
    assert test.p_value > LEVEL
    assert power(0.1, SAMPLES, test.degrees, LEVEL) > 0.99


def test_another_rows_tokens_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the tokens before are those of the next row."""
    forward = ScalePass._forward

    def wrong(self: Any, canvas: Any, scale: int, rows: Any) -> Any:
        tokens = canvas.tokens
        canvas.tokens = tokens.roll(1, 0)
        made = forward(self, canvas, scale, rows)
        canvas.tokens = tokens
        return made

    monkeypatch.setattr(ScalePass, "_forward", wrong)
    assert sample_distribution(NextScale(), "canvas", SAMPLES).p_value < 1e-9
