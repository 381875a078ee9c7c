"""Every row of a canvas run is decoded as it is alone, in ragged batches and with guidance."""

from __future__ import annotations

import pytest
import torch

from mmaccel.samplers.canvas.cache_plan import CachePlan
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.canvas.stepwise import Stepwise
from tests.fixtures.canvas import PROMPTS, masked, run

LENGTH, BLOCK = 8, 4
PLANS = [CachePlan()] + [
    CachePlan(kind, margin=2, refresh=refresh, far=far)
    for kind in ("prefix", "dual", "vicinity")
    for refresh, far in ((None, None), (3, None), (None, 2), (3, 2))
]


@pytest.mark.parametrize("guided, shift", [(False, 0), (True, 0), (False, 1), (True, 1)])
def test_a_row_does_not_depend_on_its_batch(guided: bool, shift: int) -> None:
    model = masked(shift=shift)
    for plan in PLANS:
        policy = LosslessUnmask(3, block=BLOCK, cache=plan)
        whole = run(policy, model, LENGTH, guided=guided)
        plain = run(Stepwise(block=BLOCK, cache=plan), model, LENGTH, guided=guided)
        assert torch.equal(plain.tokens, whole.tokens), plan
        for row in range(len(PROMPTS)):
            alone = run(policy, model, LENGTH, guided=guided, row=row)
            assert torch.equal(alone.tokens[0], whole.tokens[row]), plan
            assert int(alone.passes[0]) <= int(whole.passes[row])  # full passes draft nothing


@pytest.mark.parametrize("guided", [False, True])
def test_a_row_of_a_block_causal_model_does_not_depend_on_its_batch(guided: bool) -> None:
    model = masked(shift=1, block=4)
    alike = [[9, 2, 5, 1, 1, 4, 7], [13, 3, 9, 9, 2], [5]]  # branches end alike in their blocks
    for policy in (Stepwise(), Stepwise(cache="block"), LosslessUnmask(3, cache="block")):
        whole = run(policy, model, LENGTH, guided=guided, others=alike)
        for row in range(len(PROMPTS)):
            alone = run(policy, model, LENGTH, guided=guided, row=row, others=alike)
            assert torch.equal(alone.tokens[0], whole.tokens[row])
