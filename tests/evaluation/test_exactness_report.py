"""The exactness report: guarantees that hold and that do not, and rounding against bugs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import (
    Autoregressive,
    GroupedSpeculative,
    Jacobi,
    LosslessUnmask,
    SpeculativeJacobi,
    Stepwise,
    TextToImage,
)
from mmaccel.contracts import Pass
from mmaccel.evaluation.exactness.reference_models import ToyLanguage
from mmaccel.evaluation.exactness.report import (
    Check,
    Plan,
    check_all,
    check_distribution,
    check_features,
    explain_divergence,
    forced_scores,
)
from mmaccel.results import Generation
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS, masked_beside_plain

SEED = 3  # of the image of CAPTIONS[1]


@dataclass(frozen=True)
class Wrong:
    """Jacobi with another token than it should have at slot 5, in these rows of a batch."""

    exactness = "bitwise"
    window: int = 4
    rows: tuple[int, ...] | None = None

    def sample(self, model: Any, prompt: Any, length: int, **options: Any) -> Generation:
        made = Jacobi(self.window).sample(model, prompt, length, **options)
        rows = range(len(made.tokens)) if self.rows is None else self.rows
        wrong = [row for row in rows if row < len(made.tokens)]
        made.tokens[wrong, 5] = (made.tokens[wrong, 5] + 1) % model.vocab_size
        return made


def plan_of(pipe: TextToImage, policy: Any, **others: Any) -> Plan:
    captions = [CAPTIONS[k % 3] for k in range(4)]
    params = pipe.image_model.params
    return Plan(pipe, policy, Autoregressive(), captions, 7, params, 4, samples=0, **others)


def outcomes(checks: Sequence[Check]) -> dict[str, tuple[bool, bool]]:
    return {check.name: (check.guaranteed, check.holds) for check in checks}


def decode(pipe: TextToImage, **options: Any) -> Tensor:
    made: Tensor = pipe(CAPTIONS[1], policy=Autoregressive(), seed=[SEED], **options).tokens[0]
    return made


def test_a_bitwise_policy_keeps_its_tokens(pipe: TextToImage) -> None:
    checks = [*check_all(plan_of(pipe, Jacobi(5)))]
    assert outcomes(checks) == {
        "greedy": (True, True),
        "same seeds": (True, True),
        "plain loop in batches": (False, True),
        "policy in batches": (True, True),
    }
    figures = checks[1].figures
    assert figures["same"] == figures["rows"] == 4 and figures["length"] == N_TOKENS
    assert figures["first_divergence"] == [None] * 4 and 1 < figures["tokens_per_pass"] < 5


def test_wrong_tokens_break_the_guarantee_and_are_not_called_rounding(pipe: TextToImage) -> None:
    checks = [*check_all(plan_of(pipe, Wrong()))]
    found = outcomes(checks)
    assert found["greedy"] == found["same seeds"] == (True, False)
    assert found["policy in batches"] == (True, True)  # wrong everywhere, and everywhere the same
    assert checks[1].figures["first_divergence"] == [5] * 4
    assert all(not parting["is_rounding"] for parting in checks[1].figures["partings"])
    one = [*check_all(replace(plan_of(pipe, Wrong(rows=(3,))), dtype="float16"))]
    assert outcomes(one)["greedy"] == (True, True)  # three prompts, each once: no fourth row
    assert outcomes(one)["same seeds"] == outcomes(one)["policy in batches"] == (True, False)
    assert one[1].figures["first_divergence"] == [None, None, None, 5]


@pytest.mark.slow
def test_each_guarantee_has_its_own_checks(pipe: TextToImage) -> None:
    found = outcomes([*check_all(plan_of(pipe, SpeculativeJacobi(4)))])
    assert found["greedy"] == (True, True) and found["same seeds"] == (False, False)
    assert not found["policy in batches"][0]
    assert not any(check.guaranteed for check in check_all(plan_of(pipe, GroupedSpeculative(4))))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_scores_are_those_that_tokens_are_drawn_from(pipe: TextToImage, temperature: float) -> None:
    """With guidance and noise, by passes of any width; the gap is that of the worse token."""
    plan = plan_of(pipe, Jacobi(4))
    plan = replace(plan, params=replace(plan.params, temperature=temperature))
    assert plan.params.guidance_scale != 1
    made = decode(pipe, temperature=temperature)
    scores = [forced_scores(plan, CAPTIONS[1], made, SEED, width) for width in (1, 3, 16)]
    for found in scores:
        assert found.shape == (N_TOKENS, 30) and torch.equal(found.argmax(-1), made)
        assert torch.allclose(found, scores[0], atol=1e-3)
    order = scores[0][6].argsort(descending=True).tolist()
    for rank in (1, 4, 29):
        parting = explain_divergence(plan, CAPTIONS[1], made, 6, other=order[rank], seed=SEED)
        gap = float(scores[0][6, order[0]] - scores[0][6, order[rank]])
        assert parting["gap"] == pytest.approx(gap, abs=1e-4) and not parting["is_rounding"]
        assert parting["rounding"] < 1e-3
        assert parting["limit"] == pytest.approx(
            3.5e-4 * float(scores[0][:7].abs().max()), rel=0.02
        )


def test_a_window_that_attends_to_later_tokens_is_no_rounding(
    pipe: TextToImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of a window that leak the next token differ so much that they explain any gap."""
    forward = type(pipe.model).forward

    def leaky(model: Any, entries: Pass) -> Tensor:
        logits, tokens = forward(model, entries).clone(), entries.tokens
        if tokens.shape[1] > 1:  # the next token is what an entry predicts
            leak = torch.nn.functional.one_hot(tokens[:, 1:].clamp(max=29), 30)
            logits[:, :-1] += 4.0 * leak
        return logits

    monkeypatch.setattr(type(pipe.model), "forward", leaky)
    check = [*check_all(plan_of(pipe, Jacobi(5)))][1]
    assert check.is_broken and "no rounding" in check.said
    partings = check.figures["partings"]
    assert all(parting["rounding"] > 1 > parting["limit"] > 0 for parting in partings)


def test_a_gap_below_the_differences_is_rounding(
    pipe: TextToImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(plan_of(pipe, Jacobi(4)), dtype="bfloat16")  # of wide limits
    made = decode(pipe)
    scores = forced_scores(plan, CAPTIONS[1], made, SEED, 1)
    first, second = scores.topk(2).values.unbind(-1)
    slot = int((first - second).argmin())
    gap, other = float((first - second)[slot]), int(scores[slot].topk(2).indices[1])
    forward = type(pipe.model).forward
    for step, is_rounding in ((0.3 * gap, True), (0.1 * gap, False)):
        with monkeypatch.context() as patch:
            patch.setattr(
                type(pipe.model),
                "forward",
                lambda model, entries, step=step: (
                    forward(model, entries) + step * (entries.tokens.shape[1] > 1)
                ),
            )
            parting = explain_divergence(plan, CAPTIONS[1], made, slot, other=other, seed=SEED)
        assert parting["rounding"] == pytest.approx(step, rel=0.02)
        assert parting["is_rounding"] == is_rounding


def test_the_distribution_of_the_toy_by_hand() -> None:
    toy = ToyLanguage()
    assert toy.joint.shape == (3,) * 5 and float(toy.joint.sum()) == pytest.approx(1, abs=1e-9)
    toy.reserve(1, 6)
    logits = toy.forward(Pass(torch.tensor([[1, 2, 0, 2]]), torch.tensor([0])))[0]  # [4, 3]
    first, second, third = (logits[k].double().softmax(-1) for k in range(3))
    wanted = float(first[2] * second[0] * third[2])
    assert float(toy.joint[2, 0, 2].sum()) == pytest.approx(wanted, rel=1e-6)
    again = toy.forward(Pass(torch.tensor([[1]]), torch.tensor([2])))[0, 0]  # rolled back
    assert torch.equal(again, toy.tables[2][2 * 3 + 1]) and not torch.equal(again, logits[2])


@dataclass(frozen=True)
class Cold(Autoregressive):
    def sample(self, model: Any, prompt: Any, length: int, **options: Any) -> Generation:
        options["params"] = replace(options["params"], temperature=0.95)
        return super().sample(model, prompt, length, **options)


@pytest.mark.slow
def test_distributions_are_compared() -> None:
    (right,) = check_distribution(SpeculativeJacobi(3, drafts="coarse"), "window", 20_000)
    assert "with its drafts auto" in right.said  # a coarse model drafts no tokens of the toy
    assert right.guaranteed and right.holds and right.figures["n_samples"] == 20_000
    assert 0.2 < right.figures["power"] < 0.8  # so many see 0.03 about half of the time
    (relaxed,) = check_distribution(GroupedSpeculative(3), "window", 4_000)
    assert not relaxed.guaranteed and not relaxed.holds and not relaxed.is_broken
    (cold,) = check_distribution(Cold(), "window", 50_000)  # a total variation of 0.027
    assert cold.is_broken
    for policy in (Stepwise(), LosslessUnmask()):
        (filled,) = check_distribution(policy, "canvas", 4_000)
        assert filled.holds and filled.guaranteed


def test_a_canvas_is_reported_on_too(tmp_path: Path) -> None:
    masked, _ = masked_beside_plain(tmp_path)
    pipe = TextToImage.from_pretrained(masked)
    policy, plain = LosslessUnmask(order="halton"), Stepwise(order="halton")
    plan = Plan(pipe, policy, plain, CAPTIONS[:2], 0, SamplingParams(), 2, samples=100)
    found = outcomes([*check_all(plan)])
    assert found["greedy"] == found["same seeds"] == found["policy in batches"] == (True, True)
    half = replace(plan, dtype="bfloat16")
    assert not half.keeps_tokens  # rounding and bugs look the same there


def test_features_of_other_images_break_a_guarantee() -> None:
    generator = torch.Generator().manual_seed(0)
    first, same = torch.randn(2, 40, 4, generator=generator).double().numpy()
    captions = [f"caption {k % 4}" for k in range(40)]
    policy = SpeculativeJacobi(3)
    assert check_features(policy, first, same, captions).holds
    broken = check_features(policy, first, same + 2, captions)
    assert broken.is_broken and broken.figures["p_value"] <= 0.01
    assert broken.figures["power"]["visible"] <= 2.0
    # six prompts of an image each: 2 ** 6 labellings, of which a pair is as extreme as any
    few = check_features(policy, first[:6], first[:6] + 100, [str(k) for k in range(6)])
    assert not few.guaranteed and not few.is_broken and "cannot fail" in few.said
    assert few.figures["least"] == 2 / 2**6 and few.figures["power"] is None


@pytest.mark.slow
def test_features_compare_images_of_seeds_that_no_other_run_has(
    pipe: TextToImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same seeds a bitwise policy would be held against copies of its own images."""
    runs: list[tuple[Any, set[int]]] = []
    stream, shown = TextToImage.stream, []

    def record(self: TextToImage, captions: Any, *args: Any, **options: Any) -> Any:
        runs.append((options["policy"], set(options["seed"])))
        return stream(self, captions, *args, **options)

    def extract(pixels: Tensor) -> Tensor:
        shown.extend(pixels)
        return pixels.flatten(1).double()

    monkeypatch.setattr(TextToImage, "stream", record)
    policy = SpeculativeJacobi(5)
    *_, check = check_all(plan_of(pipe, policy, extract=extract))
    assert check.name == "features of images" and len(shown) == 8
    *before, (last, seeds) = runs
    assert last is policy and len(seeds) == 4
    assert all(seeds.isdisjoint(others) for _, others in before)
    *_, check = check_all(plan_of(pipe, Jacobi(5), extract=extract))
    assert check.name == "policy in batches"  # its tokens are the plain loop's
