"""`LosslessUnmask` decodes the tokens of `Stepwise`, whatever it drafts."""

from __future__ import annotations

import pytest
import torch

from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser, families
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.noise import Noise
from tests.fixtures.canvas import decode, row_of

LENGTH, ROWS = 6, 12
JOINTS = families(LENGTH, 3)
ORDERS = ("confidence", "entropy", "margin", "left", "random", "halton")


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.4])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", JOINTS)
def test_tokens_are_those_of_stepwise_decoding(name: str, order: str, temperature: float) -> None:
    case = list(JOINTS).index(name) + ORDERS.index(order)  # every joint and order meets every case
    cases = ((None, None), (3, None), (None, [2]), (2, [2]))
    for block, stop in cases if temperature == 1 else (cases[case % 4],):
        options = {"temperature": temperature, "noise": 11, "stop": stop}
        plain_model = ReferenceDenoiser(JOINTS[name])
        plain = decode(Stepwise(order, block), plain_model, LENGTH, ROWS, **options)
        for drafts in (1, 2, 4, 8) if temperature == 1 else (2, 5):
            model = ReferenceDenoiser(JOINTS[name])
            policy = LosslessUnmask(drafts, order, block)
            run = decode(policy, model, LENGTH, ROWS, **options)
            assert torch.equal(run.tokens, plain.tokens)
            assert torch.equal(run.lengths, plain.lengths)
            assert model.passes == run.stats.passes <= plain_model.passes
            assert run.stats.tokens == int(run.lengths.sum())
            assert int(run.passes.sum()) == run.stats.row_passes


def test_passes_of_independent_slots() -> None:
    """Every draft of independent slots is right."""
    for drafts, passes in ((1, 6), (2, 4), (3, 3), (6, 2)):
        model = ReferenceDenoiser(JOINTS["independent"])
        run = decode(LosslessUnmask(drafts, "left"), model, LENGTH, ROWS, noise=5)
        assert run.stats.passes == model.passes == passes


def test_rows_do_not_depend_on_their_batch() -> None:
    joint, policy = JOINTS["markov"], LosslessUnmask(3, "confidence", 3)
    noise = Noise.from_seed(2, ROWS)
    whole = decode(policy, ReferenceDenoiser(joint), LENGTH, noise=noise, stop=[2])
    for row in (0, 7, 11):
        own = row_of(noise, row)
        alone = decode(policy, ReferenceDenoiser(joint), LENGTH, noise=own, stop=[2])
        assert torch.equal(alone.tokens[0], whole.tokens[row])
        assert alone.passes[0] == whole.passes[row]
