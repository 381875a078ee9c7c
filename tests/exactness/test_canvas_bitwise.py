"""`LosslessUnmask`: numbers of drafts that change, what a run says of them, and its passes.

That its tokens are those of `Stepwise` is proved in `tests/matrix/test_canvas.py`.
"""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser
from mmaccel.samplers.canvas.draft_count import MeasuredDrafts
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.canvas.stepwise import Stepwise
from tests.fixtures.canvas import decode
from tests.fixtures.joints import families
from tests.fixtures.lanes import every

LENGTH, ROWS = 6, 12
JOINTS = families(LENGTH, 3)
ORDERS = ("confidence", "entropy", "margin", "left", "random", "halton")


@pytest.mark.parametrize("order", every(3, ORDERS))
def test_the_number_of_drafts_may_change_from_pass_to_pass(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does where it is chosen by measured cost, which no test can foresee."""
    for name in JOINTS:
        plain = decode(Stepwise(order), ReferenceDenoiser(JOINTS[name]), LENGTH, ROWS, noise=11)
        for numbers in ((2, 1, 8), (1,)):
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
