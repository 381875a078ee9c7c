"""Models of uniform corruption, whose open slots hold random tokens: caches, and which tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.canvas.stepwise import Stepwise
from tests.fixtures.canvas import MASK, Recorded, masked, run
from tests.fixtures.tiny_lms import VOCAB

LENGTH = 8


def uniform(**options: Any) -> Recorded:
    return masked(mask_token=None, **options)


def test_every_token_may_be_drawn_and_may_be_in_open_slots() -> None:
    """No id is reserved for open slots."""
    shown: list[torch.Tensor] = []

    class Watched(Recorded):
        def forward(self, entries: Any) -> torch.Tensor:
            shown.append(entries.tokens[:, -LENGTH:].clone())
            return super().forward(entries)

    model = Watched(uniform().model, None)
    shown.clear()  # its self-check
    prompts = [[5, 9, 7]] * 40
    made = run(Stepwise("left"), model, LENGTH, temperature=9.0, prompts=prompts)
    assert bool((made.tokens == MASK).any()) and int(made.tokens.max()) < VOCAB
    assert [len(noise.unique()) for noise in shown[:1]] == [VOCAB]
    for done, canvas in enumerate(shown):
        assert torch.equal(canvas[:, :done], made.tokens[:, :done])
    changed = [(a != b)[:, 1:] for a, b in zip(shown, shown[1:], strict=False)]
    assert all(float(part[:, k:].float().mean()) > 0.9 for k, part in enumerate(changed[:-1]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_cache_of_a_block_causal_model_is_exact(temperature: float) -> None:
    """A block is cached once it is full, when none of its tokens is random."""
    plain = run(Stepwise(), uniform(block=4), LENGTH, temperature)
    for policy in (Stepwise(cache="block"), LosslessUnmask(4, cache="block"), LosslessUnmask(4)):
        made = run(policy, uniform(block=4), LENGTH, temperature)
        assert torch.equal(made.tokens, plain.tokens) and made.stats.exactness == "bitwise"
        if policy == Stepwise(cache="block"):
            assert made.stats.positions < plain.stats.positions
