"""Canvas statistics: the specification against hand values, loops in doubles, a distribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mmaccel.errors import ShapeError
from mmaccel.kernels.dispatch import decide, run
from mmaccel.kernels.noise import uniforms
from mmaccel.kernels.unmask import Unmasked, unmask
from mmaccel.samplers.noise import Noise

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INFINITY = float("inf")


def call(logits: Tensor, masked: Tensor | None = None, temperature: float = 0.0) -> Unmasked:
    """`unmask` with slots 0, 1, …, seed 3 and item b in row b."""
    batch, n_positions = logits.shape[:2]
    masked = torch.ones(batch, n_positions, dtype=torch.bool) if masked is None else masked
    slots = torch.arange(n_positions).expand(batch, n_positions)
    seeds = torch.full((batch,), 3)
    return unmask(logits, masked, temperature, seeds, torch.arange(batch), slots, torch.tensor(0))


def test_by_hand() -> None:
    """Distributions (1/2, 1/4, 1/4) and (1/8, 7/8, 0), and a closed position."""
    distributions = torch.tensor([[[0.5, 0.25, 0.25], [0.125, 0.875, 0.0], [0.2, 0.3, 0.5]]])
    found = call(distributions.log() + 7, torch.tensor([[True, True, False]]))
    assert found.tokens.tolist() == [[0, 1, -1]]
    entropy = -(0.125 * math.log(0.125) + 0.875 * math.log(0.875))
    wanted = {
        "confidence": [0.5, 0.875, -INFINITY],
        "peak": [0.5, 0.875, -INFINITY],
        "gap": [0.25, 0.75, -INFINITY],
        "entropy": [1.5 * math.log(2), entropy, INFINITY],
    }
    for name, values in wanted.items():
        assert getattr(found, name)[0].tolist() == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n_values", [1, 2, 63, 100])
def test_against_loops_in_doubles(dtype: torch.dtype, n_values: int) -> None:
    logits = torch.randn(2, 3, n_values).mul(3).to(dtype)
    found = call(logits)
    for row in range(2):
        for position in range(3):
            weights = [math.exp(x) for x in logits[row, position].double().tolist()]
            p = [weight / sum(weights) for weight in weights]
            ordered = sorted(p, reverse=True) + [0.0]
            assert int(found.tokens[row, position]) == p.index(ordered[0])
            entropy = -sum(x * math.log(x) for x in p if x)
            wanted = (ordered[0], entropy, ordered[0] - ordered[1], ordered[0])
            measured = [float(part[row, position]) for part in found[1:]]
            assert measured == pytest.approx(wanted, abs=2e-6)


def test_proposals_are_those_of_the_frozen_noise() -> None:
    logits = torch.randn(2, 4, 50)
    slots = torch.arange(4).expand(2, 4)
    noise = Noise.from_seed(3, 2).gumbel(slots, 50)
    for temperature in (0.3, 1.0, 2.0):
        found = call(logits, temperature=temperature)
        wanted = (logits / temperature + noise).argmax(-1)
        assert torch.equal(found.tokens, wanted)
        p = logits.softmax(-1)
        assert torch.allclose(found.confidence, p.gather(-1, wanted[..., None])[..., 0])
        assert torch.allclose(found.peak, p.amax(-1))
    assert bool((found.confidence < found.peak).any())  # a draw, not always the most likely


def test_draws_follow_the_distribution() -> None:
    weights, n = torch.tensor([0.5, 0.3, 0.2, 0.0]), 40_000
    found = call(weights.log().expand(1, n, 4), temperature=0.5)
    counts = torch.bincount(found.tokens[0], minlength=4)
    distribution = weights.square() / weights.square().sum()
    error = (distribution * (1 - distribution) / n).sqrt()
    assert bool(((counts / n - distribution).abs() <= 4 * error).all()) and counts[3] == 0


def test_ties_take_the_lowest_id_and_have_no_gap() -> None:
    logits = torch.tensor([[[0.0, 5.0, 5.0], [2.0, 2.0, 2.0]]])
    found = call(logits)
    assert found.tokens.tolist() == [[1, 0]] and found.gap.tolist() == [[0.0, 0.0]]


def test_rows_with_nothing_to_propose_count_as_closed() -> None:
    logits = torch.full((1, 2, 5), -INFINITY)
    logits[0, 1, 3] = 1.0
    for temperature in (0.0, 1.0):
        found = call(logits, temperature=temperature)
        assert found.tokens.tolist() == [[-1, 3]]
        assert found.entropy.tolist() == [[INFINITY, 0.0]]
        assert [part.tolist() for part in found[1:] if part is not found.entropy] == [
            [[-INFINITY, 1.0]]
        ] * 3


def test_closed_positions_may_hold_anything() -> None:
    logits = torch.randn(1, 3, 9)
    masked = torch.tensor([[True, False, True]])
    clean = call(logits, masked, 1.0)
    logits[0, 1] = float("nan")
    again = call(logits, masked, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(clean, again))
    assert clean.confidence.argmin().item() == clean.entropy.argmax().item() == 1


def test_closed_positions_cost_no_noise_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """And open ones are the same to the bit as among others that are open."""
    drawn: list[int] = []

    def count(*args: Tensor | int) -> Tensor:
        noise: Tensor = uniforms(*args)  # type: ignore[arg-type]
        drawn.append(noise.shape[0] * noise.shape[1])
        return noise

    monkeypatch.setattr("mmaccel.kernels.unmask.uniforms", count)
    logits, masked = torch.randn(3, 40, 70), torch.rand(3, 40) < 0.3
    some, whole = call(logits, masked, 0.8), call(logits, None, 0.8)
    assert drawn == [int(masked.sum()), masked.numel()]
    for part, other in zip(some, whole):
        assert part[masked].equal(other[masked])
    assert call(logits, torch.zeros_like(masked), 0.8).tokens.unique().tolist() == [-1]


def test_a_batch_does_not_matter() -> None:
    logits = torch.randn(3, 2, 20)
    slots, seeds = torch.tensor([[4, 9]]), torch.tensor([8])
    whole = unmask(
        logits, torch.ones(3, 2, dtype=torch.bool), 1.0, seeds.expand(3), torch.arange(3),
        slots.expand(3, 2), torch.tensor(0),
    )  # fmt: skip
    one = unmask(
        logits[2:], torch.ones(1, 2, dtype=torch.bool), 1.0, seeds, torch.tensor([2]), slots,
        torch.tensor(0),
    )  # fmt: skip
    assert all(torch.equal(a[2:], b) for a, b in zip(whole, one))


@pytest.mark.parametrize("shape", [(2, 3), (2, 4, 5), (2, 3, 0)], ids=str)
def test_shapes_that_do_not_fit(shape: tuple[int, ...]) -> None:
    masked, none = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    slots = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ShapeError, match="canvas: expected .*, received .*; "):
        unmask(torch.zeros(shape), masked, 0.0, none, none, slots, none[0])
    with pytest.raises(ShapeError, match="bool"):
        unmask(torch.zeros(2, 3, 4), slots, 0.0, none, none, slots, none[0])


def test_dispatch_finds_it_and_answers_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MMACCEL_KERNELS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    none = torch.zeros(1, dtype=torch.int64)
    args = (torch.randn(1, 1, 4), none[None] == 0, 0.0, none, none, none[None], none[0])
    assert decide(unmask, *args).backend == "torch"
    assert all(torch.equal(a, b) for a, b in zip(run(unmask, *args), unmask(*args)))
