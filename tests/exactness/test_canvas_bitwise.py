"""`LosslessUnmask` decodes the tokens of `Stepwise`, whatever it drafts."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser, families
from mmaccel.samplers.canvas.draft_count import MeasuredDrafts
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


@pytest.mark.parametrize("order", ORDERS)
def test_the_number_of_drafts_may_change_from_pass_to_pass(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does where it is chosen by measured cost, which no test can foresee."""
    for name in JOINTS:
        plain = decode(Stepwise(order), ReferenceDenoiser(JOINTS[name]), LENGTH, ROWS, noise=11)
        for numbers in ((1, 4), (2, 1, 8), (8, 2), (1,)):
            script = cycle(numbers)
            monkeypatch.setattr(MeasuredDrafts, "choose", lambda _, rows, k=script: next(k))
            model = ReferenceDenoiser(JOINTS[name])
            run = decode(LosslessUnmask(order=order), model, LENGTH, ROWS, noise=11)
            assert torch.equal(run.tokens, plain.tokens)
            assert model.passes == run.stats.passes <= LENGTH
            assert (run.stats.canvases > ROWS * run.stats.passes) == (numbers != (1,))


def test_a_run_says_what_was_chosen_and_measures_what_passes_gain() -> None:
    """Every draft of independent slots is right: a pass of K canvases gains K."""
    seen: list[tuple[int, list[float]]] = []

    class Scripted(MeasuredDrafts):
        def choose(self, rows: int) -> int:
            assert rows == ROWS
            return 2 if len(seen) else 1

        def observe(self, number: int, gains: object, seconds: float) -> None:
            assert seconds > 0
            seen.append((number, list(gains)))  # type: ignore[call-overload]

    class Policy(LosslessUnmask):
        def draft_counts(self, run: object) -> Scripted:
            return Scripted(run, "", LENGTH)

    model = ReferenceDenoiser(JOINTS["independent"])
    run = decode(Policy(order="left"), model, LENGTH, ROWS, noise=5)
    assert seen == [(1, [1.0]), (2, [1.0, 2.0]), (2, [1.0, 2.0])]
    assert run.stats.drafts == "1 canvas a pass, too few slots for a trial of 2"
    assert "drafts       1 canvas a pass" in str(run.stats)
    fixed = decode(LosslessUnmask(2, "left"), ReferenceDenoiser(JOINTS["independent"]), LENGTH)
    assert fixed.stats.drafts == ""


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
