"""What a run over a canvas does with interrupts, callbacks, invalid logits and bad input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from mmaccel import EntropyBounded, LosslessUnmask, RevisedParallel, Stepwise
from mmaccel.contracts import CanvasPass
from mmaccel.errors import NumericsError, ShapeError
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser
from mmaccel.policies import CanvasInterrupt, CanvasProgress
from mmaccel.results import Exactness
from mmaccel.samplers.canvas.policy import SelectorPolicy
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.selector import Selector, SelectorState
from tests.fixtures.canvas import decode
from tests.fixtures.canvas_paths import enumerate_paths
from tests.fixtures.joints import families
from tests.fixtures.kv_reference import KVReference

JOINT = families(4, 3)["markov"]
SMOOTH = 0.01 / 81 + 0.99 * JOINT


def run(policy: Any = None, model: Any = None, rows: int = 2, **options: Any) -> Any:
    return decode(policy or Stepwise(), model or ReferenceDenoiser(JOINT), 4, rows, **options)


class Late(ReferenceDenoiser):
    """Invalid logits from its second pass on."""

    value = float("nan")

    def forward(self, entries: CanvasPass) -> Tensor:
        logits = super().forward(entries)
        return logits * 0 + self.value if self.passes >= 2 else logits


class Impossible(Late):
    """No token possible from its second pass on."""

    value = float("-inf")


class LateShadow(KVReference):
    """Invalid logits of shadows from its second pass on."""

    def forward(self, entries: CanvasPass) -> Tensor:
        logits = super().forward(entries).clone()
        if self.passes >= 2:
            logits[:, logits.shape[1] // 2 :] = float("nan")
        return logits


def test_an_interrupt_carries_what_was_committed() -> None:
    class Interrupted(ReferenceDenoiser):
        def forward(self, entries: CanvasPass) -> Tensor:
            if self.passes == 2:
                raise KeyboardInterrupt
            return super().forward(entries)

    whole = run()
    with pytest.raises(CanvasInterrupt) as caught:
        run(model=Interrupted(JOINT))
    is_committed = caught.value.is_committed
    assert is_committed.sum(1).tolist() == [2, 2]
    tokens = caught.value.generation.tokens
    assert torch.equal(tokens[is_committed], whole.tokens[is_committed])
    assert (tokens[~is_committed] == 3).all()
    assert isinstance(caught.value, KeyboardInterrupt)


@pytest.mark.parametrize("policy", [Stepwise(), LosslessUnmask(3)])
def test_on_step_sees_every_pass_and_may_cut_rows(policy: Any) -> None:
    found: list[CanvasProgress] = []

    def watch(progress: CanvasProgress) -> Tensor | None:
        found.append(progress)
        return torch.tensor([2, 4]) if len(found) == 1 else None

    result = run(policy, on_step=watch)
    assert [p.passes for p in found] == sorted({p.passes for p in found})
    assert len(found) == result.stats.passes
    assert result.lengths.tolist() == [2, 4]
    assert (result.tokens[0, 2:] == 0).all()
    assert int(found[-1].is_committed.sum()) >= 6
    with pytest.raises(ShapeError):
        run(policy, on_step=lambda progress: "stop")


def test_progress_is_not_changed_by_later_passes() -> None:
    found: list[CanvasProgress] = []
    run(EntropyBounded(9.0, block=2), on_step=found.append)
    nats = [float(progress.nats.sum()) for progress in found]
    assert len(nats) == 2 and 0 < nats[0] < nats[1]


@pytest.mark.parametrize(
    "policy, model",
    [
        (Stepwise(), Late),
        (Stepwise(), Impossible),
        (LosslessUnmask(1), Late),
        (RevisedParallel(0.0, "edit"), Late),
        (RevisedParallel(0.0, "edit"), Impossible),
        (RevisedParallel(1.0, "shadow"), LateShadow),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_invalid_logits_end_the_run_before_they_are_reported(policy: Any, model: Any) -> None:
    found: list[CanvasProgress] = []
    with pytest.raises(NumericsError):
        run(policy, model(SMOOTH), on_step=found.append)
    assert len(found) == 1
    assert bool((found[0].tokens[found[0].is_committed] >= 0).all())


def test_a_temperature_that_leaves_infinities_ends_the_run() -> None:
    class Raised(ReferenceDenoiser):
        def forward(self, entries: CanvasPass) -> Tensor:
            return super().forward(entries) + 1e9

    with pytest.raises(NumericsError, match="expected finite logits .*loosen the layout"):
        run(temperature=1e-30, model=Raised(JOINT))


@dataclass(frozen=True, kw_only=True)
class OneByOne(SelectorPolicy):
    """One slot a pass, in an order."""

    by: str = "sampled"

    exactness: ClassVar[Exactness] = "distribution"

    def selector(self, run: CanvasRun, state: SelectorState) -> Selector:
        return run.order(self.by)


@pytest.mark.parametrize("by", ["sampled", "confidence", "entropy"])
def test_a_selector_that_sees_samples_makes_the_run_relaxed(by: str) -> None:
    found = enumerate_paths(OneByOne(by=by), ReferenceDenoiser(SMOOTH), 4, 3)
    distance = float((found.joint - SMOOTH / SMOOTH.sum()).abs().sum() / 2)
    exactness = run(OneByOne(by=by), ReferenceDenoiser(SMOOTH)).stats.exactness
    assert exactness == ("relaxed" if by == "sampled" else "distribution")
    assert (distance > 0.05) == (exactness == "relaxed")
