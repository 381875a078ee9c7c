"""Noise kept between passes is the noise that is made anew; each slot's is made once."""

from __future__ import annotations

import pytest
import torch

from mmaccel.samplers.noise import Noise
from mmaccel.samplers.window.rolling_noise import RollingNoise

V, WIDEST = 11, 6


def test_the_noise_of_a_slot_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []
    gumbel = Noise.gumbel_on_host

    def count(self: Noise, slots: torch.Tensor, *rest: int) -> torch.Tensor:
        made.extend((self.seeds.item(), slot) for slot in slots[0].tolist())
        return gumbel(self, slots, *rest)

    noise = Noise.from_seed([5, 6], 2)
    rolling = RollingNoise(noise, V, WIDEST, length=90)
    monkeypatch.setattr(Noise, "gumbel_on_host", count)
    for start in range(0, 60, 2):
        rolling.take(torch.tensor([[start], [2 * start]]) + torch.arange(WIDEST))
    assert len(made) == len(set(made))
    assert {slot for seed, slot in made if seed == 5} <= set(range(58 + 16 + 2 * WIDEST))
    last = 2 * 58 + WIDEST  # a window may lie past the end, but nothing is made in advance there
    assert {slot for seed, slot in made if seed == 6} == set(range(last))
