"""Bytes of `sample`'s Triton version: what the configuration of the GPU check comes to.

That the kernels move these bytes is checked as they run: `tests/kernels/sample_path_cases.py`.
"""

from __future__ import annotations

import pytest

from mmaccel.kernels import sample_traffic
from mmaccel.kernels.sample import Settings
from mmaccel.kernels.sample_traffic import count_bytes, count_reads

N_VALUES, SIZE = 131_072, 2


@pytest.mark.parametrize(
    ("settings", "top_k"),
    [
        (Settings(top_k=50), 50),
        (Settings(top_k=2000), 2000),
        (Settings(top_p=0.9), 0),
        (Settings(top_k=2000, top_p=0.9), 2000),
    ],
)
def test_a_listed_row_moves_less_than_two_reads(settings: Settings, top_k: int) -> None:
    pytest.importorskip("triton")
    from mmaccel.kernels.sample_candidates_triton import first_rank

    rank = first_rank(N_VALUES, top_k, settings.top_p is not None)
    assert rank > 0
    listed = int(rank / 512 * N_VALUES)
    row = N_VALUES * SIZE
    assert row < sum(count_bytes(N_VALUES, SIZE, settings, "lists", listed)) < 1.6 * row
    between = N_VALUES // 15
    twice = count_bytes(N_VALUES, SIZE, settings, "second read", listed + between, listed)
    assert 2 * row < sum(twice) < 3.1 * row


def test_reads_by_way_and_filter() -> None:
    def reads(way: sample_traffic.Way, **params: float) -> int:
        return count_reads(N_VALUES, Settings(**params), way)  # type: ignore[arg-type]

    assert reads("lists") == 1 and reads("lists", min_p=0.1) == 2
    assert reads("search", min_p=0.1, temperature=0.0) == 1  # greedy cuts nothing off
    assert reads("search", top_k=N_VALUES) == 1 and reads("search", top_p=1.0) == 1
    assert reads("lists", top_k=9, min_p=0.1) == 1 and reads("second read", top_p=0.9) == 2
    assert reads("search", top_k=9) == 11
    assert reads("search", top_p=0.9) == 16 and reads("search", top_k=9, top_p=0.9) == 23


def test_numbers_are_the_kernels_own() -> None:
    pytest.importorskip("triton")
    from mmaccel.kernels import sample_candidates_triton, sample_threshold_triton

    for name, module in (
        ("CHUNK", sample_threshold_triton),
        ("GLANCE", sample_candidates_triton),
        ("EDGES", sample_candidates_triton),
    ):
        assert getattr(sample_traffic, name) == getattr(module, name).value
