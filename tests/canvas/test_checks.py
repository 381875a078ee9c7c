"""What a canvas run notices by itself: a badge that is not kept, no law."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.canvas_contracts import CanvasPass, CanvasProgress
from mmaccel.contracts import Prompt
from mmaccel.errors import NumericsError
from mmaccel.evaluation.exactness.canvas_enumeration import enumerate_paths
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser, families
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.canvas.masked_parallel import ByOrder
from mmaccel.samplers.canvas.policy import SelectorPolicy
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.selector import AtMost, Selector, SelectorState
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures.kv_reference import StoreOracle

LAW = 0.01 / 81 + 0.99 * families(4, 3)["markov"]


def decode(policy: Any, model: Any, length: int = 4, rows: int = 2, **options: Any) -> Generation:
    ones = torch.ones(rows, dtype=torch.int64)
    noise = Noise.from_seed(1, rows)
    prompt = Prompt(ones[:, None] * 0, ones)
    made: Generation = policy.sample(
        model, prompt, length, params=SamplingParams(), noise=noise, **options
    )
    return made


@dataclass(frozen=True, kw_only=True)
class OneByOne(SelectorPolicy):
    """One slot a pass, in an order."""

    by: str = "sampled"

    exactness: ClassVar[Exactness] = "distribution"

    def selector(self, run: CanvasRun, memory: SelectorState) -> Selector:
        return AtMost(1, ByOrder(run.order(self.by)))


@pytest.mark.parametrize("by", ["sampled", "confidence", "entropy"])
def test_a_selector_that_sees_samples_turns_the_badge_off(by: str) -> None:
    law = enumerate_paths(OneByOne(by=by), ReferenceDenoiser(LAW), 4, 3)
    distance = float((law.joint - LAW / LAW.sum()).abs().sum() / 2)
    badge = decode(OneByOne(by=by), ReferenceDenoiser(LAW)).stats.exactness
    assert badge == ("relaxed" if by == "sampled" else "distribution")
    assert (distance > 0.05) == (badge == "relaxed")


class Late(ReferenceDenoiser):
    """No law from its second pass on."""

    value = float("nan")

    def forward(self, entries: CanvasPass) -> Tensor:
        logits = super().forward(entries)
        return logits * 0 + self.value if self.passes >= 2 else logits


class Lower(Late):
    value = float("-inf")


class LateShadow(StoreOracle):
    """What shadows see has no law."""

    def forward(self, entries: CanvasPass) -> Tensor:
        logits = super().forward(entries).clone()
        if self.passes >= 2:
            logits[:, logits.shape[1] // 2 :] = float("nan")
        return logits


@pytest.mark.parametrize("model", [Late, Lower])
def test_tokens_are_not_replaced_by_scores_without_a_law(model: type[Late]) -> None:
    with pytest.raises(NumericsError, match="expected finite logits"):
        decode(mmaccel.RevisedParallel(0.0, "edit"), model(LAW))


def test_shadows_without_a_law_end_the_run() -> None:
    policy = mmaccel.RevisedParallel(0.0, "shadow", block=4)
    with pytest.raises(NumericsError, match="expected finite logits"):
        decode(mmaccel.RevisedParallel(1.0, "shadow"), LateShadow(LAW))
    assert decode(policy, StoreOracle(LAW)).stats.passes >= 1


@pytest.mark.parametrize("policy", [mmaccel.Stepwise(), mmaccel.LosslessUnmask(1)], ids=repr)
def test_nobody_is_told_of_what_was_drawn_without_a_law(policy: Any) -> None:
    told: list[CanvasProgress] = []
    with pytest.raises(NumericsError):
        decode(policy, Late(LAW), on_step=told.append)
    assert len(told) == 1
    assert bool((told[0].tokens[told[0].is_committed] >= 0).all())
