"""Bugs of coarse drafts that let rows depend on each other; the matrix must see each of them.

Policies that are exact in distribution generate other tokens from other drafts, so that any value
of another row, or of the row that had the batch slot before, is seen in them.
"""

from __future__ import annotations

from typing import Any

import pytest

from mmaccel.kernels import dispatch
from tests.exactness import planted_coarse_bugs as bugs
from tests.matrix import test_batching as matrix
from tests.matrix.test_window import Variant

open_target = matrix.open_target


@pytest.mark.slow
def test_planted_bugs_are_seen(open_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "torch")  # bugs are planted in what takes all rows
    sjd = Variant("mc-sjd", "coarse")
    matrix.test_a_row_is_the_row_alone(0, sjd, open_target)
    for plant in bugs.OF_ROWS:
        with monkeypatch.context() as patch:
            plant(patch)
            with pytest.raises(AssertionError):
                matrix.test_a_row_is_the_row_alone(0, sjd, open_target)
