"""Next-scale models and `NextScale`: passes over a cache against whole passes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import NextScale, Noise, SamplingParams, Stepwise
from mmaccel.errors import OptionError, ShapeError, UnsupportedModelError
from mmaccel.pipelines.hosts.next_scale.model import NextScaleModel
from mmaccel.policies import CanvasInterrupt, CanvasProgress
from mmaccel.results import Generation
from mmaccel.tokenizers_vq.multi_scale import Scales
from tests.fixtures.canvas import masked
from tests.fixtures.next_scale import KINDS, N_CODES, N_SLOTS, SIDES, build, network, prompt
from tests.fixtures.next_scale import quantizer as make_quantizer


def decode(kind: str, policy: Any = None, given: Any = None, **options: Any) -> Generation:
    """Guided rows of `PROMPTS`, hot so that the noise counts."""
    model = options.pop("model", None) or build(kind)
    params = SamplingParams(guidance_scale=3.0, temperature=3.0)
    made: Generation = (policy or NextScale()).sample(
        model, given or prompt(kind), N_SLOTS, params=params,
        noise=Noise.from_seed([100, 101, 102], 3), **options,
    )  # fmt: skip
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_it_has_stepwise_tokens_in_a_pass_a_scale(kind: str) -> None:
    """Passes over the cache are those over everything, of ragged, guided rows."""
    counts: list[list[int]] = []
    made = decode(kind, on_step=lambda progress: counts.append(progress.lengths.tolist()))
    plain = decode(kind, Stepwise())
    assert made.tokens.equal(plain.tokens) and (made.lengths == N_SLOTS).all()
    assert made.stats.passes == 3 and plain.stats.passes == N_SLOTS and made.stats.nats == 0
    assert counts == [[1] * 3, [5] * 3, [14] * 3] and made.stats.exactness == "bitwise"


@dataclass(frozen=True)
class Given(Scales):
    """Forces the first slots."""

    n: int = 0

    def forced(self, slots: Tensor) -> Tensor:  # type: ignore[override]
        return torch.where(slots < self.n, slots % 5, -1)


@pytest.mark.parametrize(("n", "passes"), [(1, 2), (3, 2), (5, 1), (9, 1), (14, 0)])
def test_scales_that_a_layout_gives_are_read(n: int, passes: int) -> None:
    given = replace(prompt(), layout=Given(SIDES, N_CODES, n))
    made, plain = decode("text", given=given), decode("text", Stepwise(), given=given)
    assert made.tokens.equal(plain.tokens) and made.stats.passes == passes
    assert made.tokens[:, :n].eq(torch.arange(n) % 5).all()


def test_a_run_ends_where_the_caller_says() -> None:
    whole = decode("text").tokens

    def cut(progress: CanvasProgress) -> Tensor | None:
        return torch.tensor([1, 7, 14]) if progress.passes == 1 else None

    made = decode("text", on_step=cut)
    assert made.lengths.tolist() == [1, 7, 14] and made.stats.passes == 3
    for row, n in enumerate(made.lengths.tolist()):
        assert made.tokens[row, :n].equal(whole[row, :n])

    def interrupt(progress: CanvasProgress) -> None:
        if progress.passes == 2:
            raise KeyboardInterrupt

    with pytest.raises(CanvasInterrupt) as stopped:
        decode("text", on_step=interrupt)
    assert stopped.value.is_committed.sum(1).tolist() == [5, 5, 5]
    assert stopped.value.generation.tokens[:, :5].equal(whole[:, :5])


def test_half_precision_has_its_numbers_in_the_cache() -> None:
    model = NextScaleModel(network("text").bfloat16(), make_quantizer())
    made = decode("text", model=model)
    assert model.dtype == torch.bfloat16 and model._cache.keys[0].dtype == torch.bfloat16
    assert made.stats.dtype == "bfloat16" and (made.tokens < N_CODES).all()


def test_what_does_not_fit_the_scales_is_refused_before_a_pass() -> None:
    noise, params = Noise.from_seed(0, 3), SamplingParams(guidance_scale=2.0)
    for policy in (NextScale(), Stepwise()):
        for length in (N_SLOTS - 1, N_SLOTS + 1):
            with pytest.raises(OptionError, match=f"length: expected 14 slots.*received {length}"):
                policy.sample(build(), prompt(), length, params=params, noise=noise)
    for sides in ((2, 3), ()):
        with pytest.raises(ShapeError, match=r"sides: expected .*; begin with 1"):
            network("class", sides=sides)


def test_a_model_of_one_scale_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="its slots are of one scale; choose Lossless"):
        noise = Noise.from_seed(0, 3)
        NextScale().sample(masked(), prompt(), N_SLOTS, params=SamplingParams(), noise=noise)
