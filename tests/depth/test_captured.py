"""Frames of captured passes are those of eager ones, and later frames replay the same graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.pipelines.hosts.depth.window import DepthWindow
from tests.depth.models import Speech
from tests.fixtures.graph_replay import replay_runs

PLAIN, FAST = mmaccel.Autoregressive(), mmaccel.Jacobi(window=8, drafts="previous-frame")


def speak(speech: Speech, policy: Any, sync_every: int = 1) -> tuple[Tensor, Any]:
    """Sampled frames of a few words, and what became of each frame's run."""
    torch.manual_seed(1)
    runs: list[mmaccel.Stats] = []
    options: Any = {"seed": 3, "strict": True, "sync_every": sync_every}
    with mmaccel.attach(speech.decoder, policy, **options) as handle:
        made = speech.call(True)
        runs += handle.history
    return made, runs


def test_captured_frames_are_those_of_eager_passes(
    speech: Speech, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, _ = speak(speech, FAST)
    replay_runs(monkeypatch)
    made, runs = speak(speech, FAST)
    assert torch.equal(made, eager)
    assert all(stats.runner == "cuda graphs" and not stats.fallbacks for stats in runs)
    captured = [stats.captures for stats in runs]
    assert captured[0] > 0 and not any(captured[2:]), captured


def test_the_passes_of_a_frame_are_one_graph_behind_its_first(
    csm: Speech, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, runs = speak(csm, PLAIN)
    n_codes = runs[0].passes
    replay_runs(monkeypatch)
    made, runs = speak(csm, PLAIN, sync_every=n_codes - 1)
    assert torch.equal(made, eager)
    assert {stats.passes for stats in runs} == {n_codes}
    assert sum(stats.captures for stats in runs) == 1


def test_a_frame_that_is_replayed_with_the_state_of_the_one_before_is_seen(
    csm: Speech, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, _ = speak(csm, FAST)
    load = DepthWindow.load_static

    def keep(self: DepthWindow, buffers: dict[str, Any]) -> None:
        self.states = buffers["states"]  # the bug
        load(self, buffers)

    monkeypatch.setattr(DepthWindow, "load_static", keep)
    replay_runs(monkeypatch)
    made, _ = speak(csm, FAST)
    assert not torch.equal(made, eager)
