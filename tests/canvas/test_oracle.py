"""The oracle keeps stepwise decoding's tokens and commits all that is right at every pass."""

from __future__ import annotations

import pytest
import torch

import mmaccel
from mmaccel import Noise, SamplingParams, Stepwise
from mmaccel.contracts import Prompt
from mmaccel.demo.canvas_benchmark import Oracle
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser
from mmaccel.samplers.canvas.predictions import SlotPredictions
from tests.fixtures.canvas import independent
from tests.fixtures.joints import families

LENGTH, ROWS = 5, 40


def options() -> dict[str, object]:
    return {"params": SamplingParams(), "noise": Noise.from_seed(3, ROWS)}


def prompt() -> Prompt:
    ones = torch.ones(ROWS, dtype=torch.int64)
    return Prompt(0 * ones[:, None], ones)


@pytest.mark.parametrize("family", list(families(LENGTH, 3)))
def test_it_commits_what_is_right_and_nothing_else(family: str) -> None:
    model = ReferenceDenoiser(families(LENGTH, 3)[family])
    plain = Stepwise("confidence").sample(model, prompt(), LENGTH, **options())  # type: ignore[arg-type]
    oracle = Oracle(plain.tokens)
    run = oracle.open(model, prompt(), LENGTH, **options())
    seen: list[SlotPredictions] = []
    run.draws = lambda predictions: seen.append(predictions) or predictions  # type: ignore[func-returns-value]
    made = oracle.decode(run)
    assert torch.equal(made.tokens, plain.tokens)
    for row in range(ROWS):
        n_open = LENGTH
        for one in seen:
            is_open = one.is_open[row]
            n_before = int(is_open.sum())
            if not n_before:
                break
            assert n_before == n_open
            assert one.drawn is not None
            right = is_open & (one.drawn[row] == plain.tokens[row])
            n_open -= max(1, int(right.sum()))
        assert n_open == 0


def test_independent_slots_take_one_pass_and_copies_as_many_as_groups() -> None:
    model = ReferenceDenoiser(independent(*[[0.6, 0.3, 0.1]] * LENGTH))
    plain = Stepwise("confidence").sample(model, prompt(), LENGTH, **options())  # type: ignore[arg-type]
    made = Oracle(plain.tokens).sample(model, prompt(), LENGTH, **options())  # type: ignore[arg-type]
    assert made.stats.passes == 1 and made.stats.tokens_per_pass == LENGTH


def test_lossless_decoding_takes_no_fewer_passes() -> None:
    model = ReferenceDenoiser(families(LENGTH, 3)["markov"])
    lossless = mmaccel.LosslessUnmask(drafts=4, order="confidence")
    other = lossless.sample(model, prompt(), LENGTH, **options())  # type: ignore[arg-type]
    made = Oracle(other.tokens).sample(model, prompt(), LENGTH, **options())  # type: ignore[arg-type]
    assert torch.equal(made.tokens, other.tokens)
    assert made.stats.row_passes <= other.stats.row_passes


def test_wrong_tokens_are_wanted_one_a_pass() -> None:
    """Told tokens that are never drawn, it commits them all the same."""
    model = ReferenceDenoiser(independent(*[[0.6, 0.3, 0.1]] * LENGTH))
    wanted = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    greedy = {**options(), "params": SamplingParams(temperature=0.0)}
    made = Oracle(wanted).sample(model, prompt(), LENGTH, **greedy)  # type: ignore[arg-type]
    assert made.tokens.eq(1).all() and made.stats.passes == LENGTH
