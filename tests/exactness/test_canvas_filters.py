"""Entropy bounds hold for the target distribution, the one that tokens are drawn from.

There are two groups of slots, each of which holds copies of one token. Temperature, top-k and top-p
turn such a joint into another one of the same kind, so that the result of stepwise decoding is
known: the groups' own distributions, filtered.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass, Prompt
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser
from mmaccel.samplers.canvas.entropy_bounded import EntropyBounded
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.exactness.test_canvas_distribution import divergence, total_correlation, variation
from tests.fixtures.toy_models import distribution_by_hand

LENGTH, TOKENS = 4, 3
GROUPS = torch.tensor([[0.7, 0.25, 0.05], [0.5, 0.3, 0.2]], dtype=torch.float64)  # slots 0 2, 1 3
FILTERS: list[dict[str, Any]] = [
    {"temperature": 2.0},
    {"temperature": 0.5},
    {"top_k": 2},
    {"top_p": 0.75},
    {"temperature": 1.5, "top_k": 2},
    {"temperature": 1.5, "top_n_sigma": 1.5},
    {"top_h": 0.9},
    {"eta_cutoff": 0.15},
    {"entropy_temperature": 1.0},
]


class Pairs(ReferenceDenoiser):
    """Uniform where a canvas is impossible; what follows there has probability 0 in any case."""

    def forward(self, entries: CanvasPass) -> Tensor:
        logits = super().forward(entries)
        return torch.where((logits == float("-inf")).all(-1, keepdim=True), 0.0, logits)


class Paths(NamedTuple):
    """Every outcome: its probability, its charge, and the canvas and choice of each pass."""

    joint: Tensor  # [V] * L
    nats: Tensor  # [N]
    steps: list[tuple[Tensor, Tensor]]  # per pass [N, L]: the canvas, -1 where open; the choice


def filtered(params: dict[str, Any]) -> Tensor:
    """The distributions of both groups, `[2, V]`."""
    by_hand = distribution_by_hand(**params)
    return torch.tensor([by_hand([row.log().tolist()], 0) for row in GROUPS], dtype=torch.float64)


def copies(groups: Tensor) -> Tensor:
    """The joint distribution of four slots."""
    pair = torch.diag_embed(groups)  # [2, V, V]
    return torch.einsum("ac,bd->abcd", *pair)


def entropies(groups: Tensor) -> list[float]:
    return torch.special.entr(groups).sum(-1).tolist()


def paths_of(policy: Any, params: dict[str, Any]) -> Paths:
    """Every outcome as a row that draws exactly its tokens. The choice does not depend on draws, so
    that the probability of a row is the product of those of its tokens.
    """
    outcomes = torch.tensor(list(product(range(TOKENS), repeat=LENGTH)))
    n, groups = len(outcomes), filtered(params)
    prompt = Prompt(outcomes.new_zeros(n, 1), outcomes.new_ones(n))
    options = {"params": SamplingParams(**params), "noise": Noise(*outcomes.new_zeros(2, n))}
    run = policy.open(Pairs(copies(GROUPS)), prompt, LENGTH, **options)
    before, chances = [], []

    def prescribe(seen: SlotPredictions) -> SlotPredictions:
        canvas = torch.where(run.canvas.is_committed, run.canvas.tokens, -1)
        other = canvas.roll(2, 1)  # the other slot of the group
        own = groups[torch.arange(LENGTH) % 2].gather(1, outcomes.T).T
        before.append(canvas)
        chances.append(torch.where(other < 0, own, (other == outcomes).double()))
        return replace(seen, drawn=outcomes.gather(1, seen.slots))

    run.draws = prescribe
    made = policy.decode(run)
    after = [*before[1:], made.tokens]
    steps = [(a, (a < 0) & (b >= 0)) for a, b in zip(before, after, strict=True)]
    weight = torch.ones(n, dtype=torch.float64)
    for (_, chosen), chance in zip(steps, chances, strict=True):
        weight = weight * torch.where(chosen, chance, 1.0).prod(1)
    return Paths(weight.view((TOKENS,) * LENGTH), run.bound.nats, steps)


def costs_of(paths: Paths, params: dict[str, Any]) -> list[float]:
    """Nats of every choice at every possible canvas."""
    possible = copies(filtered(params))
    rows = (paths.joint.flatten() > 0).nonzero()[:, 0]
    states = {
        (tuple(canvas.tolist()), tuple(chosen.tolist()))
        for canvases, choices in paths.steps
        for canvas, chosen in zip(canvases[rows], choices[rows], strict=True)
        if chosen.any()
    }
    return [total_correlation(possible, torch.tensor(a), torch.tensor(b)) for a, b in states]


@pytest.mark.parametrize("params", [{}, *FILTERS], ids=str)
def test_stepwise_decodes_the_filtered_distribution(params: dict[str, Any]) -> None:
    paths = paths_of(Stepwise("entropy"), params)
    assert variation(paths.joint, copies(filtered(params))) < 1e-6
    assert float(paths.nats.max()) == 0.0


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_no_step_diverges_from_the_filtered_distribution_by_more_than_gamma(
    params: dict[str, Any],
) -> None:
    """Two copies at once cost the entropy of what they copy, and the bound is met exactly."""
    cost = min(entropies(filtered(params)))
    assert abs(cost - min(entropies(GROUPS))) > 0.05
    for gamma in (cost - 1e-3, cost + 1e-3):
        paths = paths_of(EntropyBounded(gamma), params)
        found = max(costs_of(paths, params))
        assert found <= gamma + 1e-6
        assert found == pytest.approx(cost if gamma > cost else 0.0, abs=1e-6)


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_no_sequence_diverges_from_the_filtered_distribution_by_more_than_its_budget(
    params: dict[str, Any],
) -> None:
    true, cost = copies(filtered(params)), sum(entropies(filtered(params)))
    for nats in (sum(entropies(GROUPS)) + 1e-3, cost - 1e-3, cost + 1e-3):
        paths = paths_of(EntropyBounded(budget_nats=nats), params)
        found = divergence(true, paths.joint)
        assert found <= nats + 1e-6
        charged = paths.nats[paths.joint.flatten() > 0]
        assert found <= float(charged.max()) + 1e-6 <= nats + 2e-6
        if nats > cost:  # and it buys something
            assert found >= min(entropies(filtered(params))) - 1e-6
