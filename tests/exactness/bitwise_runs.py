"""Runs for the equality tests: six ragged rows with seeds, and the loop written by hand."""

from __future__ import annotations

import math
from typing import Any

import torch

from mmaccel import ContinuousBatching, Grid, Noise
from mmaccel.evaluation.exactness.g_test import first_divergence
from mmaccel.kernels.noise import uniforms
from mmaccel.policies import Policy
from mmaccel.results import Generation
from mmaccel.samplers.noise import Stream
from tests.fixtures.toy_distribution import forced_by_hand
from tests.fixtures.toy_models import ToyLanguage, distribution_by_hand, sample

LENGTH = 27
WINDOWS = (1, 2, 3, 5, 16, 64, "adaptive")
GRID = Grid(rows=3, width=4, vocab_size=5, tokens=(0, 4), row_end=4, image_end=3)
PROMPTS = [[1, 2, 3], [0], [4, 4], [2, 2, 2, 2], [0, 1], [3, 0, 3, 0, 3]]
OTHERS = [[0], [1, 1], [1], [1, 4, 0], [2], [2]]
SEEDS = [11, 2**64 - 5, 2**63 + 9, 0, 11, 7]  # two rows share a seed
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "filtered": {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.05},
    "adaptive": {"temperature": 1.3, "top_n_sigma": 1.5, "top_h": 0.9, "eta_cutoff": 0.1},
    "guided, two temperatures": {
        "guidance_scale": 1.5,
        "temperature": 1.4,
        "entropy_temperature": 0.3,
        "divergence_temperature": 0.8,
    },  # fmt: skip
    "spread": {"spread": 3},
    "guided": {"guidance_scale": 2.0, "temperature": 1.2, "top_k": 4},
    "guided greedy": {"guidance_scale": 1.5, "temperature": 0.0},
}


def run(
    policy: Policy,
    options: dict[str, Any],
    rows: list[int] | None = None,
    *,
    model: ToyLanguage | None = None,
    grid: Grid | None = GRID,
    stop: list[int] | None = None,
    on_step: Any = None,
    length: int = LENGTH,
    batching: ContinuousBatching | None = None,
) -> Generation:
    rows = list(range(len(PROMPTS))) if rows is None else rows
    tokens = [PROMPTS[b] for b in rows]
    if "guidance_scale" in options:
        tokens += [OTHERS[b] for b in rows]
    return sample(
        policy, model or ToyLanguage(5, depth=6), tokens, length, seed=[SEEDS[b] for b in rows],
        stops=stop, layout=grid, batching=batching, on_step=on_step, **options,
    )  # fmt: skip


def code_by_hand(seed: int, n_codes: int, item: int = 0) -> float:
    """The code of an item of a seed in arithmetic sampling: its n-th part, and the seed's shift."""
    zero = torch.zeros(1, dtype=torch.int64)
    key = torch.tensor([(seed + 2**63) % 2**64 - 2**63])
    shift = uniforms(key, zero, zero[:, None], 1, torch.tensor(int(Stream.CODE)))
    return (item % n_codes + float(shift)) / n_codes


def loop_by_hand(row: int, options: dict[str, Any], grid: Grid | None) -> list[int]:
    """One row, token by token: argmax of the log-probabilities plus the slot's noise."""
    model, by_hand = ToyLanguage(5, depth=6), dict(options)
    by_hand["scale"] = by_hand.pop("guidance_scale", 1.0)
    if grid is not None:
        by_hand["forced"] = lambda slot: forced_by_hand(grid, slot)
        by_hand["allowed"] = range(*(grid.tokens or (0, 5)))
    n_codes = by_hand.pop("spread", None)
    distribution_of, noise = distribution_by_hand(**by_hand), Noise.from_seed([SEEDS[row]], 1)
    code, width = code_by_hand(SEEDS[row], n_codes or 1), 1.0
    prompts = [PROMPTS[row]] + ([OTHERS[row]] if "guidance_scale" in options else [])
    made: list[int] = []
    for slot in range(LENGTH):
        distribution = distribution_of(
            [model.logits_of([*prompt, *made]) for prompt in prompts], slot
        )
        frozen = noise.gumbel(torch.tensor([[slot]]), 5)[0, 0].tolist()
        possible = [v for v in range(5) if distribution[v] > 0]
        if n_codes is not None and width > 1 / n_codes:
            token = next(v for v in range(5) if sum(distribution[: v + 1]) > code)
            code = (code - sum(distribution[:token])) / distribution[token]
            width *= distribution[token]
        else:
            token = max(possible, key=lambda v: math.log(distribution[v]) + frozen[v])
        made.append(token)
    return made


def assert_same(first: Generation, second: Generation) -> None:
    parted = first_divergence(first.tokens, second.tokens)
    assert parted.eq(first.tokens.shape[1]).all(), f"rows part at {parted.tolist()}"
    assert first.lengths.equal(second.lengths)
