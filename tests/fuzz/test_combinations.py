"""Random legal calls of `generate`, of fixed seeds; `tests.fuzz.combinations` runs others."""

from __future__ import annotations

import pytest

from tests.fuzz.combinations import check

CALLS, PARTS = 60, 4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_legal_calls_are_right(part: int) -> None:
    found = {seed: check(seed) for seed in range(part, CALLS, PARTS)}
    said = list(found.values())
    assert said.count("") > len(said) // 2  # not refused
    assert {seed: each for seed, each in found.items() if each not in ("", "refused")} == {}
