"""`benchmarks/coarse_study.py`: its setups, and what it times between two passes."""

from __future__ import annotations

from pathlib import Path

import pytest

import mmaccel
from benchmarks.coarse_study import make_setups, measure_online, share_of_a_pass, timed_sweeps
from mmaccel.commands.bench.window import Row
from mmaccel.samplers.drafting.coarse_drafter import CoarseDrafter
from tests.fixtures.tiny_coarse import build_coarse
from tests.fixtures.tiny_model import CAPTIONS


def test_setups_are_windows_by_sources_and_candidates_of_the_first() -> None:
    first, *setups = make_setups(["c1", "c2"], [8, 16], [4, 16])
    assert first.name == "autoregressive"
    c1, c2 = mmaccel.Coarse("c1"), mmaccel.Coarse("c2")
    sources = ["neighbour", c1, c2, mmaccel.Coarse("c1", 4)]
    assert [s.policy for s in setups] == [mmaccel.Jacobi(w, s) for w in (8, 16) for s in sources]


def test_every_pass_is_timed_by_policy(tiny_folder: Path, tmp_path: Path) -> None:
    pipe = mmaccel.TextToImage.from_pretrained(tiny_folder)
    coarse = mmaccel.Jacobi(8, mmaccel.Coarse(build_coarse(pipe, tmp_path / "coarse")))
    before = vars(CoarseDrafter)["redraft"]
    with timed_sweeps() as seconds:
        for policy in (mmaccel.Jacobi(8, "neighbour"), coarse):
            made = pipe(CAPTIONS[0], policy=policy, seed=0, guidance_scale=1.0)
    assert vars(CoarseDrafter)["redraft"] is before and list(seconds) == [(repr(coarse), 1.0)]
    times = seconds[repr(coarse), 1.0]
    assert [len(times[name]) for name in ("redraft", "record")] == [made.stats.passes] * 2
    times["redraft"], times["record"] = [9.0, 0.2, 0.1], [0.1]
    row = Row(
        policy="jacobi", window=8, dtype="float32", drafts="c1", guidance=1.0,
        settings=repr(coarse), route="fused", exactness="bitwise", images=1, passes=8.0,
        tokens_per_pass=2.0, half_width=None, seconds=30.0, speed_up=1.0, identical=1,
        sampler_share=0.2, total_variation=0.0,
    )  # fmt: skip
    assert share_of_a_pass(row, seconds) == pytest.approx((0.2 + 0.1) / (30 * 0.8 / 8))


def test_online_drafts_are_learned_from_nothing(tiny_folder: Path) -> None:
    """The same passes when measured again: nothing that was learned stays."""
    params = mmaccel.SamplingParams()
    with timed_sweeps() as seconds:
        rows = [measure_online(str(tiny_folder), CAPTIONS[:2], 8, params, 0)[0] for _ in range(2)]
    assert rows[0].drafts == "online" and rows[0].passes == rows[1].passes
    assert rows[0].identical == 2 and share_of_a_pass(rows[0], seconds) > 0
