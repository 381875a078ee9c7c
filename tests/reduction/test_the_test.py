"""Do the tests of reducers see bugs? Published ones are planted; a test must fail for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.reduction import planted_reducer_bugs as bugs
from tests.reduction import test_laws, test_planted, test_references

Check = Callable[[], None]
counts, rows = test_laws.check_counts, test_laws.check_rows


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Check]] = {
    "unsorted": (bugs.leave_indices_unsorted, partial(counts, "FastV", 0.5)),
    "truncated counts": (bugs.truncate_counts, partial(counts, "UniformTokens", 0.22)),
    "truncated shares": (bugs.truncate_shares, partial(counts, "HiRED", 0.22)),
    "normalised after the mask": (
        bugs.normalise_after_the_mask,
        test_references.check_attention_mass,
    ),
    "next layer": (bugs.read_the_next_layer, partial(test_planted.check_attention, "FastV")),
    "padding ranked": (bugs.rank_padding, partial(rows, "FastV", 0.22)),
    "random by batch": (bugs.draw_by_batch, partial(rows, "RandomTokens", 0.22)),
    "target plus mean": (bugs.add_target_and_mean, partial(counts, "VisionZip", 0.22)),
}


@pytest.mark.parametrize("plant, check", PLANTED.values(), ids=PLANTED)
def test_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    check()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
