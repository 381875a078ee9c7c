"""What a canvas run notices by itself: a model that leaks, a badge that is not kept, no law."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.canvas_contracts import CanvasPass, CanvasProgress
from mmaccel.contracts import Prompt
from mmaccel.errors import NumericsError, UnsupportedModelError
from mmaccel.evaluation.canvas_law import induced_law
from mmaccel.evaluation.oracles import OracleDenoiser, families
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.canvas_leak import check_leaks
from mmaccel.samplers.canvas_run import CanvasRun
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.select import Memory, Selector
from mmaccel.samplers.select_order import ByOrder
from mmaccel.samplers.select_sets import AtMost
from mmaccel.samplers.selector_policy import SelectorPolicy
from tests.store_oracle import StoreOracle

LAW = 0.01 / 81 + 0.99 * families(4, 3)["markov"]


def decode(policy: Any, model: Any, length: int = 4, rows: int = 2, **options: Any) -> Generation:
    ones = torch.ones(rows, dtype=torch.int64)
    noise = Noise.from_seed(1, rows)
    prompt = Prompt(ones[:, None] * 0, ones)
    made: Generation = policy.sample(
        model, prompt, length, filters=Filters(), noise=noise, **options
    )
    return made


class Blocks:
    """Logits are a hash of what an entry sees at its places, in blocks of 4.

    Args:
        leaks: "" for a model that keeps its word; "reads" for one that looks at every place;
            "later" for one that looks at the next block's first token alone.
    """

    vocab_size, mask_token, block, has_store = 11, 10, 4, True
    device = torch.device("cpu")

    def __init__(self, leaks: str = "") -> None:
        self.leaks, self.passes = leaks, 0

    def reserve(self, rows: int, places: int) -> None:
        self.kept = torch.zeros(rows, places, dtype=torch.float64)

    def forward(self, entries: CanvasPass) -> Tensor:
        self.passes += 1
        kept = self.kept[: len(entries.tokens)]
        held = (entries.tokens + 1).double() * (entries.positions + 2)
        kept.scatter_(1, entries.places, held)
        reads = entries.reads.expand(-1, entries.tokens.shape[1], -1).double()
        if self.leaks == "reads":
            reads = torch.ones_like(reads)
        seen = (reads * kept[:, None]).sum(-1).gather(1, entries.queries)
        at = entries.positions.gather(1, entries.queries)
        if self.leaks == "later":
            follows = entries.positions[:, None] == (at // 4 * 4 + 4)[..., None]
            seen = seen + (follows * entries.tokens[:, None]).sum(-1)
        return torch.sin(torch.arange(11.0) * (1 + at[..., None]) * 1.7 + seen[..., None])


@pytest.mark.parametrize("leaks", ["reads", "later"])
def test_a_model_that_sees_later_blocks_is_refused_where_they_are_kept(leaks: str) -> None:
    model, told = Blocks(leaks), []
    with pytest.raises(UnsupportedModelError, match="depend on no later block.*a Blocks whose"):
        decode(mmaccel.Stepwise(cache="block"), model, 12, on_step=told.append)
    assert told == [] and model.passes == 2
    assert decode(mmaccel.Stepwise(), model, 12).stats.passes == 12  # every pass is over it all


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_model_that_keeps_its_word_is_served(dtype: torch.dtype) -> None:
    class Rounded(Blocks):
        def forward(self, entries: CanvasPass) -> Tensor:
            return super().forward(entries).to(dtype)

    plain = decode(mmaccel.Stepwise(), Rounded(), 12)
    made = decode(mmaccel.Stepwise(cache="block"), Rounded(), 12)
    assert torch.equal(made.tokens, plain.tokens) and made.stats.exactness == "bitwise"
    assert made.stats.positions < plain.stats.positions


@pytest.mark.parametrize("vocab", [1, 2])
def test_where_nothing_can_be_compared_nothing_is_refused(vocab: int) -> None:
    class Few(Blocks):
        vocab_size, mask_token = vocab, vocab - 1

        def forward(self, entries: CanvasPass) -> Tensor:
            return super().forward(entries)[..., :vocab]

    check_leaks(Few("reads"), 1)


def test_who_has_tried_a_model_says_so() -> None:
    class Tried(Blocks):
        is_tried = True

    for kind, passes in ((Tried, 0), (Blocks, 2)):
        model = kind()
        made = decode(mmaccel.Stepwise(cache="block"), model, 12)
        assert model.passes == made.stats.passes + passes


@dataclass(frozen=True, kw_only=True)
class OneByOne(SelectorPolicy):
    """One slot a pass, in an order."""

    by: str = "sampled"

    exactness: ClassVar[Exactness] = "distribution"

    def selector(self, run: CanvasRun, memory: Memory) -> Selector:
        return AtMost(1, ByOrder(run.order(self.by)))


@pytest.mark.parametrize("by", ["sampled", "confidence", "entropy"])
def test_a_selector_that_sees_samples_turns_the_badge_off(by: str) -> None:
    law = induced_law(OneByOne(by=by), OracleDenoiser(LAW), 4, 3)
    distance = float((law.joint - LAW / LAW.sum()).abs().sum() / 2)
    badge = decode(OneByOne(by=by), OracleDenoiser(LAW)).stats.exactness
    assert badge == ("relaxed" if by == "sampled" else "distribution")
    assert (distance > 0.05) == (badge == "relaxed")


class Late(OracleDenoiser):
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
