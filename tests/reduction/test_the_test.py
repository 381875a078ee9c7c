"""Do the tests of reducers see bugs? Published ones are planted; a test must fail for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from mmaccel.reduction.visual_tokens import budgets
from tests.reduction import planted_reducer_bugs as bugs
from tests.reduction import test_budgets, test_laws, test_planted, test_references

Check = Callable[[], None]
counts, rows = test_laws.check_counts, test_laws.check_rows
attention = test_planted.check_attention

PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Check]] = {
    "unsorted": (bugs.leave_indices_unsorted, partial(counts, "FastV", 0.5)),
    "one too many": (bugs.keep_one_too_many, partial(counts, "FastV", 0.5)),
    "truncated counts": (bugs.truncate_counts, partial(counts, "UniformTokens", 0.22)),
    "truncated shares": (bugs.truncate_shares, partial(counts, "HiRED", 0.22)),
    "truncated shares of frames": (bugs.truncate_shares, partial(counts, "VidCom2", 0.22)),
    "stages drift": (
        bugs.let_stages_drift,
        lambda: test_budgets.check_stages(lambda *a: budgets.geometric(*a), 0.22),
    ),
    "tiles by column": (bugs.number_tiles_by_column, partial(test_planted.check_tiles, "an L")),
    "normalised after the mask": (
        bugs.normalise_after_the_mask,
        test_references.check_attention_mass,
    ),
    "next layer": (bugs.read_the_next_layer, partial(attention, "FastV")),
    "next layer, staged": (bugs.read_the_next_layer, partial(attention, "PyramidDrop")),
    "next layer, encoder": (bugs.read_the_next_layer, partial(attention, "HiRED")),
    "other queries": (bugs.read_other_queries, partial(attention, "VisionZip")),
    "padding ranked": (bugs.rank_padding, partial(rows, "FastV", 0.22)),
    "random by place": (
        bugs.number_random_tokens_with_padding,
        partial(rows, "RandomTokens", 0.22),
    ),
    "random by batch": (bugs.draw_by_batch, partial(rows, "RandomTokens", 0.22)),
    "destinations by batch": (bugs.draw_by_batch, partial(rows, "ToMe", 0.6)),
    "target plus mean": (bugs.add_target_and_mean, partial(counts, "VisionZip", 0.22)),
    "far from the last": (
        bugs.compare_with_the_last_pick,
        partial(test_references.check_divprune, 20),
    ),
    "same frame": (bugs.compare_with_the_same_frame, test_planted.check_changes),
    "even frames": (bugs.share_frames_evenly, test_planted.check_frames),
}


@pytest.mark.parametrize("plant, check", PLANTED.values(), ids=PLANTED)
def test_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    check()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
