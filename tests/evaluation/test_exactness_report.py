"""The exactness report: guarantees that hold and that do not, and rounding against bugs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
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
from mmaccel.evaluation.exactness import identity
from mmaccel.evaluation.exactness import report as exactness_report
from mmaccel.evaluation.exactness.distribution_checks import check_distribution, check_features
from mmaccel.evaluation.exactness.identity import (
    Check,
    Decoding,
    Divergence,
    explain_divergence,
    forced_scores,
)
from mmaccel.evaluation.exactness.reference_models import ToyLanguage
from mmaccel.evaluation.exactness.report import Plan
from mmaccel.evaluation.exactness.report import check_all as each_check
from mmaccel.pipelines.text_to_image.outputs import ImageOutput
from mmaccel.results import Generation, Stats
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS, masked_beside_plain

ROWS, LENGTH = 7, 5
SEED, ASKED = 7, [CAPTIONS[k % 3] for k in range(5)]


def check_all(plan: Plan) -> list[Check]:
    return [*each_check(plan)]


@dataclass(frozen=True)
class Wrong:
    """Jacobi, but slot 5 of every row in a batch has another token than it should."""

    exactness = "bitwise"
    window: int = 4
    only_in_batches: bool = False

    def sample(self, model: Any, prompt: Any, length: int, **options: Any) -> Generation:
        made = Jacobi(self.window).sample(model, prompt, length, **options)
        if len(made.tokens) > 1 or not self.only_in_batches:
            made.tokens[:, 5] = (made.tokens[:, 5] + 1) % model.vocab_size
        return made


@dataclass(frozen=True)
class Rare:
    """Jacobi, but the fourth row of a batch has one wrong token."""

    exactness = "bitwise"
    window: int = 4

    def sample(self, model: Any, prompt: Any, length: int, **options: Any) -> Generation:
        made = Jacobi(self.window).sample(model, prompt, length, **options)
        made.tokens[3:4, 9] = (made.tokens[3:4, 9] + 1) % model.vocab_size
        return made


def plan_of(pipe: TextToImage, policy: Any, **others: Any) -> Plan:
    captions = [CAPTIONS[k % 3] for k in range(4)]
    params = pipe.image_model.params
    return Plan(pipe, policy, Autoregressive(), captions, 7, params, 4, "float32", 0, **others)


def second_of(
    pipe: TextToImage, tokens: Tensor, slot: int, params: SamplingParams | None = None
) -> int:
    """The second best token at a slot of the image of CAPTIONS[1] and seed 3."""
    noise, params = Noise.from_seed([3], 1), params or pipe.image_model.params
    scores = forced_scores(pipe, CAPTIONS[1], tokens, params, noise, 1)
    return int(scores[slot].topk(2).indices[1])


def explain(
    pipe: TextToImage,
    tokens: Tensor,
    slot: int,
    other: int,
    params: SamplingParams | None = None,
    dtype: str = "float32",
) -> Divergence:
    """Of windows of 4 on the image of CAPTIONS[1] and seed 3."""
    decoding = Decoding(pipe, params or pipe.image_model.params, 4, dtype)
    noise = Noise.from_seed([3], 1)
    return explain_divergence(decoding, CAPTIONS[1], tokens, slot, other=other, noise=noise)


def outcomes(checks: Sequence[Check]) -> dict[str, tuple[bool, bool]]:
    return {check.name: (check.guaranteed, check.holds) for check in checks}


def test_a_bitwise_policy_keeps_its_tokens(pipe: TextToImage) -> None:
    checks = check_all(plan_of(pipe, Jacobi(5)))
    assert outcomes(checks) == {
        "greedy": (True, True),
        "same seeds": (True, True),
        "plain loop in batches": (False, True),
        "policy in batches": (True, True),
    }
    figures = checks[1].figures
    assert figures["same"] == figures["rows"] == 4 and figures["length"] == N_TOKENS
    assert figures["first_divergence"] == [None] * 4 and 1 < figures["tokens_per_pass"] < 5


def test_a_wrong_token_breaks_the_guarantee_and_is_not_called_rounding(pipe: TextToImage) -> None:
    checks = check_all(plan_of(pipe, Wrong()))
    found = outcomes(checks)
    assert found["greedy"] == found["same seeds"] == (True, False)
    assert found["policy in batches"] == (True, True)  # wrong everywhere, and everywhere the same
    assert [check.is_broken for check in checks[:2]] == [True, True]
    figures = checks[1].figures
    assert figures["first_divergence"] == [5] * 4 and figures["same"] == 0
    assert all(p["slot"] == 5 and not p["is_rounding"] for p in figures["partings"])
    batches = outcomes(check_all(plan_of(pipe, Wrong(only_in_batches=True))))
    assert batches["policy in batches"] == (True, False)
    assert batches["plain loop in batches"] == (False, True)


def test_one_wrong_row_of_many_is_seen_and_rounding_is_that_of_the_dtype(
    pipe: TextToImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes: list[str] = []

    def explain(decoding: Decoding, *arguments: Any, **options: Any) -> Any:
        dtypes.append(decoding.dtype)
        return explain_divergence(decoding, *arguments, **options)

    monkeypatch.setattr("mmaccel.evaluation.exactness.identity.explain_divergence", explain)
    checks = check_all(replace(plan_of(pipe, Rare()), dtype="float16"))
    found = outcomes(checks)
    assert found["same seeds"] == (True, False)
    assert found["greedy"] == (True, True)  # three prompts, each once: there is no fourth row
    assert checks[1].figures["first_divergence"] == [None, None, None, 9]
    assert set(dtypes) == {"float16"} and len(dtypes) == 2  # batches of four held to single rows


def test_each_guarantee_has_its_own_checks(pipe: TextToImage) -> None:
    found = outcomes(check_all(plan_of(pipe, SpeculativeJacobi(4))))
    assert found["greedy"] == (True, True) and found["same seeds"] == (False, False)
    assert not found["policy in batches"][0]
    checks = check_all(plan_of(pipe, GroupedSpeculative(4)))
    assert not any(check.guaranteed for check in checks)


def test_scores_are_those_that_tokens_are_drawn_from(pipe: TextToImage) -> None:
    """The argmax at every slot is the plain loop's token, with guidance and noise, any width."""
    params = pipe.image_model.params
    assert params.guidance_scale != 1
    made = pipe(CAPTIONS[1], policy=Autoregressive(), seed=[3]).tokens[0]
    noise = Noise.from_seed([3], 1)
    scores = [forced_scores(pipe, CAPTIONS[1], made, params, noise, w) for w in (1, 3, 16)]
    for found in scores:
        assert found.shape == (N_TOKENS, 30) and torch.equal(found.argmax(-1), made)
        assert torch.allclose(found, scores[0], atol=1e-3)
    parting = explain(pipe, made, 6, second_of(pipe, made, 6))
    first, second = scores[0][6].sort(descending=True).values[:2]
    assert parting.gap == pytest.approx(float(first - second), abs=1e-5)
    assert parting.rounding < 1e-3 and not parting.is_rounding


def test_greedy_scores_keep_the_second_best(pipe: TextToImage) -> None:
    params = replace(pipe.image_model.params, temperature=0.0)
    made = pipe(CAPTIONS[1], policy=Autoregressive(), seed=[3], temperature=0.0).tokens[0]
    noise = Noise.from_seed([3], 1)
    scores = forced_scores(pipe, CAPTIONS[1], made, params, noise, 1)
    assert torch.equal(scores.argmax(-1), made) and bool(scores.isfinite().all())
    other = second_of(pipe, made, 2, params)
    gap = explain(pipe, made, 2, other, params).gap
    assert gap is not None and 0 < gap < 20
    alone = replace(pipe.image_model.params, top_k=1)
    only = pipe(CAPTIONS[1], policy=Autoregressive(), seed=[3], top_k=1).tokens[0]
    other = (int(only[2]) + 1) % 30
    parting = explain(pipe, only, 2, other, alone)
    assert parting.gap is None and not parting.is_rounding


def test_the_gap_is_that_of_the_token_that_was_taken(
    pipe: TextToImage,
) -> None:
    """Not the gap between the two best tokens."""
    params, noise = pipe.image_model.params, Noise.from_seed([3], 1)
    made = pipe(CAPTIONS[1], policy=Autoregressive(), seed=[3]).tokens[0]
    scores = forced_scores(pipe, CAPTIONS[1], made, params, noise, 1)[6]
    order = scores.argsort(descending=True).tolist()
    for rank in (1, 4, 29):
        parting = explain(pipe, made, 6, order[rank])
        wanted = float(scores[order[0]] - scores[order[rank]])
        assert parting.gap == pytest.approx(wanted, abs=1e-5)


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
    checks = check_all(plan_of(pipe, Jacobi(5)))
    assert outcomes(checks)["same seeds"] == (True, False)
    partings = checks[1].figures["partings"]
    assert partings and all(p["rounding"] > 1 > p["limit"] > 0 for p in partings)
    assert any(p["gap"] <= 4 * p["rounding"] for p in partings)  # what once explained it
    assert "no rounding" in checks[1].said


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 3.5e-4), ("bfloat16", 0.088)])
def test_half_of_the_digits_are_the_limit(pipe: TextToImage, dtype: str, limit: float) -> None:
    params, noise = pipe.image_model.params, Noise.from_seed([3], 1)
    made = pipe(CAPTIONS[1], policy=Autoregressive(), seed=[3]).tokens[0]
    found = explain(pipe, made, 15, 0, dtype=dtype)
    largest = forced_scores(pipe, CAPTIONS[1], made, params, noise, 1).abs().max()
    assert found.limit == pytest.approx(limit * float(largest), rel=0.02)


def test_a_gap_below_the_differences_is_rounding(
    pipe: TextToImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, noise = pipe.image_model.params, Noise.from_seed([3], 1)
    made = pipe(CAPTIONS[1], policy=Autoregressive(), seed=[3]).tokens[0]
    scores = forced_scores(pipe, CAPTIONS[1], made, params, noise, 1)
    first, second = scores.topk(2).values.unbind(-1)
    slot = int((first - second).argmin())
    gap, other = float((first - second)[slot]), second_of(pipe, made, slot)
    assert 0.01 < gap < 1
    forward = type(pipe.model).forward

    def noisy(step: float) -> Any:
        def coarse(model: Any, entries: Pass) -> Tensor:
            logits = forward(model, entries)
            return logits + step * (entries.tokens.shape[1] > 1) * torch.ones(1)

        return coarse

    for step, is_rounding in ((0.3 * gap, True), (0.1 * gap, False)):
        with monkeypatch.context() as patch:
            patch.setattr(type(pipe.model), "forward", noisy(step))
            parting = explain(pipe, made, slot, other, dtype="bfloat16")  # of wide limits
        assert parting.rounding == pytest.approx(step, rel=0.02)
        assert parting.is_rounding == is_rounding


def test_the_distribution_of_the_toy_by_hand() -> None:
    toy = ToyLanguage()
    joint = toy.distribution()
    assert joint.shape == (243,) and float(joint.sum()) == pytest.approx(1, abs=1e-9)
    toy.reserve(1, 8)
    logits = toy.forward(Pass(torch.tensor([[1, 2, 0, 2]]), torch.tensor([0])))[0]  # [4, 3]
    first, second, third = (logits[k].double().softmax(-1) for k in (1, 2, 3))
    begins = joint.view(3, 3, 27)[0, 2]  # all that begin with 0, 2
    assert float(begins.sum()) == pytest.approx(float(first[0] * second[2]), rel=1e-6)
    assert float(begins[9:18].sum() / begins.sum()) == pytest.approx(float(third[1]), rel=1e-6)
    again = toy.forward(Pass(torch.tensor([[1]]), torch.tensor([2])))[0, 0]  # rolled back
    assert not torch.allclose(again, logits[2])
    other = toy.logits_after(torch.tensor([[1, 2, 1]]), torch.tensor([2]))[0]
    assert torch.equal(again, other)


def test_distributions_are_compared() -> None:
    (right,) = check_distribution(SpeculativeJacobi(3), "window", 20_000)
    assert right.guaranteed and right.holds and right.figures["n_samples"] == 20_000
    assert 0.2 < right.figures["power"] < 0.6  # so many see 0.03 about half of the time
    (relaxed,) = check_distribution(GroupedSpeculative(3), "window", 4_000)
    assert not relaxed.guaranteed and not relaxed.holds and not relaxed.is_broken

    @dataclass(frozen=True)
    class Cold(Autoregressive):
        def sample(self, model: Any, prompt: Any, length: int, **options: Any) -> Generation:
            options["params"] = replace(options["params"], temperature=0.95)
            return super().sample(model, prompt, length, **options)

    (cold,) = check_distribution(Cold(), "window", 50_000)  # a total variation of 0.028
    assert cold.is_broken
    (plain,) = check_distribution(Stepwise(), "canvas", 10)
    assert plain.holds and plain.guaranteed
    assert check_distribution(LosslessUnmask(), "canvas", 10) == []


def test_a_canvas_is_reported_on_too(tmp_path: Path) -> None:
    masked, _ = masked_beside_plain(tmp_path)
    pipe = TextToImage.from_pretrained(masked)
    policy = LosslessUnmask(order="halton")
    plan = Plan(
        pipe, policy, Stepwise(order="halton"), CAPTIONS[:2], 0, SamplingParams(), 2, "float32", 100
    )
    found = outcomes(check_all(plan))
    assert found["greedy"] == found["same seeds"] == found["policy in batches"] == (True, True)
    half = replace(plan, dtype="bfloat16")
    assert not half.keeps_tokens  # rounding and bugs look the same there


def test_features_of_other_images_break_a_guarantee() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(40, 4, generator=generator).double().numpy()
    captions = [f"caption {k % 4}" for k in range(40)]
    same = torch.randn(40, 4, generator=generator).double().numpy()
    policy = SpeculativeJacobi(3)
    assert check_features(policy, first, same, captions).holds
    broken = check_features(policy, first, same + 2, captions)
    assert broken.is_broken and broken.figures["p_value"] <= 0.01
    assert broken.figures["power"]["visible"] <= 2.0


def test_too_few_images_guarantee_nothing() -> None:
    """Six prompts of an image each: 2 ** 6 labellings, of which a pair is as extreme as any."""
    first = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double().numpy()
    captions = [f"caption {k}" for k in range(6)]
    found = check_features(SpeculativeJacobi(3), first, first + 100, captions)
    assert not found.guaranteed and not found.is_broken and "cannot fail" in found.said
    assert found.figures["least"] == 2 / 2**6 and found.figures["power"] is None
    ten = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)).double().numpy()
    more = check_features(SpeculativeJacobi(3), ten, ten + 100, [f"{k}" for k in range(10)])
    assert more.figures["least"] == 2 / 2**10 and more.guaranteed and more.is_broken


@pytest.mark.parametrize("worst", [None, 0, ROWS - 1])
def test_one_row_that_rounding_does_not_explain_breaks_the_guarantee(
    worst: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    explained: list[int] = []

    def explain(decoding: Decoding, caption: str, *_: Any, **__: Any) -> Any:
        explained.append(int(caption))
        assert decoding.dtype == "bfloat16"  # which rounds more than float32
        own = {"gap": 1.0, "rounding": 1.0, "limit": 2.0, "is_rounding": int(caption) != worst}
        return Divergence(**{name: own.get(name) for name in Divergence.__dataclass_fields__})

    monkeypatch.setattr(identity, "explain_divergence", explain)
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    names = [str(row) for row in range(ROWS)]
    stats = Stats(policy="p", exactness="bitwise", tokens=ROWS * LENGTH, passes=1, row_passes=ROWS)
    passes = torch.ones(ROWS, dtype=torch.int64)
    plain = ImageOutput([], tokens, passes, stats, names)
    other = ImageOutput([], tokens + torch.tensor([0, 0, 1, 0, 0]), passes, stats, names)
    pipe: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu"), kind="window"))
    decoding = Decoding(pipe, SamplingParams(), 4, "bfloat16")
    seeds = list(range(ROWS))
    check = identity.compare_rows("x", decoding, plain, other, seeds, guaranteed=True)
    assert explained == list(range(ROWS))
    assert check.holds == (worst is None) and check.is_broken == (worst is not None)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_features_compare_images_of_seeds_that_no_other_run_has(
    pipe: TextToImage, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    """With the same seeds a bitwise policy would be held against copies of its own images."""
    runs: list[tuple[Any, list[str], set[int]]] = []
    stream, shown, tested = TextToImage.stream, [], []

    def record(self: TextToImage, captions: Any, *args: Any, **options: Any) -> Any:
        runs.append((options["policy"], list(captions), set(options["seed"])))
        return stream(self, captions, *args, **options)

    def extract(pixels: Tensor) -> Tensor:
        shown.extend(pixels)
        return pixels.flatten(1).double()

    def check(policy: Any, first: Any, second: Any, captions: Any) -> Check:
        tested.append((policy, first, second, list(captions)))
        return Check("features of images", True, True, "", {})

    monkeypatch.setattr(TextToImage, "stream", record)
    monkeypatch.setattr(exactness_report, "check_features", check)
    plain, policy = Autoregressive(), SpeculativeJacobi(5)
    params = pipe.image_model.params
    check_all(Plan(pipe, policy, plain, ASKED, SEED, params, batch_size, "float32", 0, extract))
    *before, (last, captions, seeds) = runs
    assert [len(each) for _, each, _ in before[:2]] == [3, 3]  # greedy: of each prompt once
    assert last is policy and captions == ASKED and len(seeds) == 5
    assert before and all(seeds.isdisjoint(others) for _, _, others in before)

    assert len(tested) == 1
    check_all(Plan(pipe, Jacobi(5), plain, ASKED, SEED, params, batch_size, "float32", 0, extract))
    assert len(tested) == 1  # its tokens are the plain loop's
    monkeypatch.undo()
    wanted = [
        torch.from_numpy(_pixels(pipe, plain, range(SEED, SEED + 5))),
        torch.from_numpy(_pixels(pipe, policy, sorted(seeds))),
    ]
    assert torch.equal(torch.stack(shown), torch.cat(wanted))
    ((checked, first, second, with_captions),) = tested
    assert checked is policy and with_captions == ASKED
    for found, pixels in zip((first, second), wanted, strict=True):
        assert torch.equal(torch.from_numpy(found), pixels.flatten(1).double())
    assert not any((a == b).all() for a in first for b in second)


def _pixels(pipe: TextToImage, policy: Any, seeds: Any) -> Any:
    """Images of the captions, `[N, 3, H, W]` uint8."""
    made = pipe(ASKED, policy=policy, seed=list(seeds))
    return np.stack([np.asarray(image).transpose(2, 0, 1) for image in made.images])
