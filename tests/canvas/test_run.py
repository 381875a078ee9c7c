"""What a run over a canvas does with interrupts, callbacks, stale models and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmaccel.canvas_contracts import CanvasInterrupt, CanvasPass, CanvasProgress
from mmaccel.contracts import Prompt
from mmaccel.errors import NumericsError, OptionError, ShapeError, UnsupportedModelError
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser, families
from mmaccel.samplers.canvas.entropy_bounded import EntropyBounded
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.canvas.revised_parallel import RevisedParallel
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams

LAW = families(4, 3)["markov"]


def run(policy: Any = None, model: Any = None, rows: int = 2, **options: Any) -> Any:
    prompt = options.pop("prompt", None) or Prompt(
        torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, dtype=torch.int64)
    )
    options.setdefault("params", SamplingParams())
    options.setdefault("noise", Noise.from_seed(0, rows))
    length = options.pop("length", 4)
    return (policy or Stepwise()).sample(model or ReferenceDenoiser(LAW), prompt, length, **options)


def test_an_interrupt_brings_what_was_committed() -> None:
    class Slow(ReferenceDenoiser):
        def forward(self, entries: CanvasPass) -> torch.Tensor:
            if self.passes == 2:
                raise KeyboardInterrupt
            return super().forward(entries)

    whole = run()
    with pytest.raises(CanvasInterrupt) as caught:
        run(model=Slow(LAW))
    kept = caught.value.is_committed
    assert kept.sum(1).tolist() == [2, 2]
    tokens = caught.value.generation.tokens
    assert torch.equal(tokens[kept], whole.tokens[kept])
    assert (tokens[~kept] == 3).all()
    assert isinstance(caught.value, KeyboardInterrupt)


@pytest.mark.parametrize("policy", [Stepwise(), LosslessUnmask(3)])
def test_on_step_sees_every_pass_and_may_cut_rows(policy: Any) -> None:
    seen: list[CanvasProgress] = []

    def watch(progress: CanvasProgress) -> torch.Tensor | None:
        seen.append(progress)
        return torch.tensor([2, 4]) if len(seen) == 1 else None

    result = run(policy, on_step=watch)
    assert [p.passes for p in seen] == sorted({p.passes for p in seen})
    assert len(seen) == result.stats.passes
    assert result.lengths.tolist() == [2, 4]
    assert (result.tokens[0, 2:] == 0).all()
    assert int(seen[-1].is_committed.sum()) >= 6
    with pytest.raises(ShapeError, match="on_step"):
        run(policy, on_step=lambda progress: "stop")


def test_scores_without_a_law_end_the_run() -> None:
    class Broken(ReferenceDenoiser):
        def forward(self, entries: CanvasPass) -> torch.Tensor:
            logits = super().forward(entries)
            return logits * float("nan") if self.passes == 3 else logits

    for policy in (Stepwise(), LosslessUnmask(1)):
        with pytest.raises(NumericsError, match="expected finite logits"):
            run(policy, model=Broken(LAW))


def test_a_temperature_that_leaves_no_law_ends_the_run() -> None:
    """Scores are numbers, and are none any more behind a division by next to nothing."""

    class Raised(ReferenceDenoiser):
        def forward(self, entries: CanvasPass) -> torch.Tensor:
            return super().forward(entries) + 1e9

    with pytest.raises(NumericsError, match="expected finite logits .*loosen the layout"):
        run(params=SamplingParams(temperature=1e-30), model=Raised(LAW))


def test_what_a_callback_keeps_stays_as_it_was() -> None:
    seen: list[CanvasProgress] = []
    run(EntropyBounded(9.0, block=2), on_step=seen.append)
    kept = [float(progress.nats.sum()) for progress in seen]
    assert len(kept) == 2 and 0 < kept[0] < kept[1]


def test_a_wrong_draft_may_be_impossible() -> None:
    """Drafts that hold what the model thinks impossible are rejected, and no error."""
    law = families(4, 3)["shuffle"]
    plain = run(model=ReferenceDenoiser(law), rows=40)
    fast = run(LosslessUnmask(4), model=ReferenceDenoiser(law), rows=40)
    assert torch.equal(plain.tokens, fast.tokens)


def test_bad_input_is_refused_before_the_first_pass() -> None:
    masked = Prompt(torch.tensor([[0, 3]]), torch.tensor([2]))
    padded = Prompt(torch.tensor([[0, 3]]), torch.tensor([1]))  # the mask id is padding
    params = SamplingParams(processor=lambda scores, line, columns: scores)
    for kind, message, options in (
        (OptionError, "at least 1 slot, received 0", {"length": 0}),
        (OptionError, "divides 4 slots, received 3; ask for 6", {"policy": Stepwise(block=3)}),
        (OptionError, "no mask token, received id 3 in row 0", {"prompt": masked, "rows": 1}),
        (OptionError, "expected no processor", {"params": params}),
        (ShapeError, "noise: expected 2 rows, received 3", {"noise": Noise.from_seed(0, 3)}),
        (UnsupportedModelError, 'choose cache="none"', {"policy": Stepwise(cache="dual")}),
        (UnsupportedModelError, 'revise="edit"', {"policy": RevisedParallel()}),
        (OptionError, "block-causal model", {"policy": Stepwise(cache="block")}),
        (ShapeError, "expected 2 branches", {"params": SamplingParams(guidance_scale=2.0)}),
    ):
        model = ReferenceDenoiser(LAW)
        if kind is OptionError and "block-causal" in message:
            model.supports_kv_cache = True
        with pytest.raises(kind, match=message):
            run(model=model, **options)
        assert model.passes == 0
    run(prompt=padded, rows=1)


def test_policies_refuse_bad_options() -> None:
    for make, message in (
        (lambda: Stepwise(order="best"), "order: expected one of confidence"),
        (lambda: Stepwise(block=0), "block: expected an integer >= 1 or None, received 0"),
        (lambda: Stepwise(cache="fast"), "cache: expected one of none"),
        (lambda: LosslessUnmask(drafts=0), "drafts: expected an integer in 1..256, received 0"),
        (lambda: LosslessUnmask(drafts=True), "received True"),
        (lambda: LosslessUnmask(order="sampled"), "does not look at what was drawn"),
        (lambda: LosslessUnmask(layout="rows", cache="dual"), "layout: expected 'entries'"),
    ):
        with pytest.raises(OptionError, match=message):
            make()


def test_exactness_says_what_the_options_make_of_it() -> None:
    assert Stepwise().exactness == LosslessUnmask().exactness == "bitwise"
    assert Stepwise(cache="block").exactness == "bitwise"
    assert Stepwise(order="sampled").exactness == "relaxed"
    assert Stepwise(cache="dual").exactness == "relaxed"
    assert LosslessUnmask(cache="prefix").exactness == "relaxed"


def test_an_order_by_what_was_drawn_is_another_law() -> None:
    """Guards the badge: with an exact model and one slot a pass it misses the law by far."""
    from mmaccel.evaluation.exactness.g_test import count_sequences, g_test

    n = 3000
    for order, is_right in (("confidence", True), ("sampled", False)):
        result = run(Stepwise(order), rows=n, noise=Noise.from_seed(7, n))
        test = g_test(count_sequences(result.tokens, 3), LAW.flatten())
        assert (test.p_value > 1e-3) == is_right
