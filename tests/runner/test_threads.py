"""The number of CPU threads: measured, and torch's own where nothing is clearly faster."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmaccel import TextToImage
from mmaccel.cli import main
from mmaccel.commands import sheets as image_job
from mmaccel.pipelines.hosts.runner.threads import (
    choose_threads,
    is_chosen_already,
    list_counts,
    measure_threads,
)
from tests.fixtures.tiny_model import CAPTIONS


def test_numbers_to_try() -> None:
    assert [list_counts(most) for most in (1, 6, 8)] == [[1], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_every_number_is_measured_with_that_many_threads() -> None:
    before, used = torch.get_num_threads(), []

    def run() -> float:
        used.append(torch.get_num_threads())
        return {1: 1.0, 2: 0.5, 4: 9.0}[used[-1]]

    measured = measure_threads(run, [1, 2, 4], budget=60)
    assert measured == {1: 1.0, 2: 0.5, 4: 9.0}
    assert used.count(1) == used.count(2) == 4 and used.count(4) == 1  # hopeless
    used.clear()
    measure_threads(run, [1, 2], budget=0)
    assert used == [1, 2] and torch.get_num_threads() == before


def test_the_number_is_as_before_after_an_error() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        measure_threads(_interrupt, [before + 1])
    assert torch.get_num_threads() == before


def _interrupt() -> float:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("measured", "own", "chosen"),
    [({1: 1.0, 2: 1.04}, 2, 2), ({1: 1.0, 2: 1.2}, 2, 1), ({1: 2.0, 2: 1.0, 4: 1.5}, 4, 2)],
)
def test_torchs_own_number_stays_where_it_is_nearly_the_fastest(
    measured: dict[int, float], own: int, chosen: int
) -> None:
    assert choose_threads(measured, own) == chosen


def test_the_command_takes_the_fastest_and_says_so(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(image_job, "is_chosen_already", lambda: False)
    monkeypatch.setattr(image_job, "list_counts", lambda most: [1, 2])
    torch.set_num_threads(2)
    slow = {1: 0.001, 2: 0.04}
    monkeypatch.setattr(TextToImage, "warm_up", lambda *a: slow[torch.get_num_threads()])
    arguments = ["generate", CAPTIONS[0], "--model", str(tiny_folder), "--out", str(tmp_path)]
    try:
        assert main(arguments) == 0 and torch.get_num_threads() == 1
        said = capsys.readouterr().out
        assert "threads: 1 of 2, the fastest for this model now" in said and "2: 40.0 ms" in said
        assert main([*arguments, "--threads", "2"]) == 0 and torch.get_num_threads() == 2
        assert "threads:" not in capsys.readouterr().out
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("setting", "cores", "chosen"), [("2", 4, True), ("", 4, False), ("", 1, True)]
)
def test_the_environment_or_a_single_core_chooses(
    setting: str, cores: int, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if setting:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    assert is_chosen_already() == chosen
