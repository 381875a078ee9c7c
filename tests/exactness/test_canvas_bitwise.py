"""`LosslessUnmask` makes the tokens of `Stepwise`, whatever it drafts."""

from __future__ import annotations

import pytest
import torch

from mmaccel.contracts import Prompt
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser, families
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams

LENGTH, ROWS = 6, 12
LAWS = families(LENGTH, 3)
ORDERS = ("confidence", "entropy", "margin", "left", "random", "halton")


def prompt(stop: int | None = None) -> Prompt:
    ones = torch.ones(ROWS, dtype=torch.int64)
    return Prompt(
        torch.zeros(ROWS, 1, dtype=torch.int64),
        ones,
        stop_tokens=None if stop is None else torch.tensor([stop]),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.4])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("law", LAWS)
def test_tokens_are_those_of_stepwise_decoding(law: str, order: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    case = list(LAWS).index(law) + ORDERS.index(order)  # every law and order meets every case
    cases = ((None, None), (3, None), (None, 2), (2, 2))
    for block, stop in cases if temperature == 1 else (cases[case % 4],):
        noise = Noise.from_seed(11, ROWS)
        options = {"params": params, "noise": noise}
        plain_model = ReferenceDenoiser(LAWS[law])
        plain = Stepwise(order, block).sample(plain_model, prompt(stop), LENGTH, **options)
        for drafts in (1, 2, 4, 8) if temperature == 1 else (2, 5):
            model = ReferenceDenoiser(LAWS[law])
            policy = LosslessUnmask(drafts, order, block)
            run = policy.sample(model, prompt(stop), LENGTH, **options)
            assert torch.equal(run.tokens, plain.tokens)
            assert torch.equal(run.lengths, plain.lengths)
            assert model.passes == run.stats.passes <= plain_model.passes
            assert run.stats.tokens == int(run.lengths.sum())
            assert int(run.passes.sum()) == run.stats.row_passes


def test_passes_of_independent_slots() -> None:
    """Where slots know nothing of each other, every draft is right."""
    options = {"params": SamplingParams(), "noise": Noise.from_seed(5, ROWS)}
    for drafts, passes in ((1, 6), (2, 4), (3, 3), (6, 2)):
        model = ReferenceDenoiser(LAWS["independent"])
        run = LosslessUnmask(drafts, "left").sample(model, prompt(), LENGTH, **options)
        assert run.stats.passes == model.passes == passes


def test_rows_do_not_see_each_other() -> None:
    """A batch makes the tokens of its rows alone, and of another batch they are in."""
    law = LAWS["markov"]
    policy = LosslessUnmask(3, "confidence", 3)
    noise = Noise.from_seed(2, ROWS)
    whole = policy.sample(
        ReferenceDenoiser(law), prompt(2), LENGTH, params=SamplingParams(), noise=noise
    )
    one = torch.ones(1, dtype=torch.int64)
    for row in (0, 7, 11):
        alone = policy.sample(
            ReferenceDenoiser(law),
            Prompt(torch.zeros(1, 1, dtype=torch.int64), one, stop_tokens=torch.tensor([2])),
            LENGTH,
            params=SamplingParams(),
            noise=Noise(noise.seeds[row : row + 1], noise.items[row : row + 1]),
        )
        assert torch.equal(alone.tokens[0], whole.tokens[row])
        assert alone.passes[0] == whole.passes[row]
