"""`benchmarks/coarse_study.py`: its setups, and what it times between two passes."""

from __future__ import annotations

from pathlib import Path

import pytest

import mmaccel
from benchmarks.coarse_study import list_policies, measure_online, share_of_a_pass, timed_sweeps
from mmaccel.samplers.drafting.coarse_drafter import CoarseDrafter
from tests.fixtures.tiny_coarse import build_coarse
from tests.fixtures.tiny_model import CAPTIONS


def test_setups_are_windows_by_sources_candidates_and_rounds() -> None:
    first, *policies = list_policies(["c1", "c2"], [8, 16], [4, 16], [3])
    assert first[0] == "autoregressive"
    c1, c2 = mmaccel.Coarse("c1"), mmaccel.Coarse("c2")
    sources = ["neighbour", c1, c2, mmaccel.Coarse("c1", 4), mmaccel.Coarse("c1", rounds=3)]
    assert [policy for _, policy in policies] == [
        mmaccel.Jacobi(w, s) for w in (8, 16) for s in sources
    ]


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
    row = {"settings": repr(coarse), "guidance": 1.0, "passes": 8.0, "seconds": 30.0}
    row |= {"sampler_share": 0.2}
    assert share_of_a_pass(row, seconds) == pytest.approx((0.2 + 0.1) / (30 * 0.8 / 8))


def test_online_drafts_are_learned_from_nothing(tiny_folder: Path) -> None:
    """The same passes when measured again: nothing that was learned stays."""
    params = mmaccel.SamplingParams()
    with timed_sweeps() as seconds:
        rows = [measure_online(str(tiny_folder), CAPTIONS[:2], 8, params, 0)[0] for _ in range(2)]
    assert rows[0]["drafts"] == "online" and rows[0]["passes"] == rows[1]["passes"]
    assert rows[0]["identical"] == 2 and share_of_a_pass(rows[0], seconds) > 0
