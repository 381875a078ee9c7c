"""Samplers against the enumerated law of a toy language: settings, sampling and the G-test.

The N samples are the rows of one batch, so that rows advance differently in every run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import Layout, Policy, TokenModel
from mmaccel.evaluation.exactness.g_test import GTest, combine, count_sequences, g_test, power
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise
from mmaccel.tokenizers_vq.grid import Grid
from tests.toy import ToyLanguage, enumerate_law, law_by_hand, make_prompt

LEVEL = 1e-4  # reject below this p-value
VISIBLE = 0.03  # total variation that has to be seen ...
POWER = 0.99  # ... with this probability, whatever direction it has
SAMPLES = 50_000

Case = tuple[tuple[int, ...], ...]
"""One prompt per guidance branch."""


@dataclass(frozen=True, eq=False)
class Setting:
    """What is sampled.

    Attributes:
        cases: prompts; row b of the batch has case b modulo their number.
        length: L.
        vocab_size: V.
        options: arguments of `Filters`.
        grid: layout, or None.
        allowed: slot to the ids a layout other than a grid leaves, written by hand.
        samples: N.
        spread: of the logits; a guided language needs less, or few sequences are left.
    """

    cases: tuple[Case, ...] = (((1, 2),),)
    length: int = 5
    vocab_size: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    grid: Layout | None = None
    allowed: Callable[[int], Sequence[int]] | None = None
    samples: int = SAMPLES
    spread: float = 1.5

    def language(self, seed: int = 1) -> ToyLanguage:
        return ToyLanguage(self.vocab_size, seed, self.spread)

    @functools.cached_property
    def laws(self) -> list[Tensor]:
        """The law of every case, by filters written by hand."""
        by_hand: dict[str, Any] = dict(self.options)
        by_hand["scale"] = by_hand.pop("guidance_scale", 1.0)
        if self.allowed is not None:
            by_hand["allowed"] = self.allowed
        elif isinstance(self.grid, Grid):
            by_hand["forced"] = functools.partial(forced_by_hand, self.grid)
            by_hand["allowed"] = range(*(self.grid.tokens or (0, self.vocab_size)))
        law_of = law_by_hand(**by_hand)
        model = self.language()
        return [
            torch.tensor(
                list(enumerate_law(model, [list(p) for p in case], self.length, law_of).values()),
                dtype=torch.float64,
            )
            for case in self.cases
        ]


def forced_by_hand(grid: Grid, slot: int) -> int:
    """The structural token at a slot, found by writing the picture out; -1 where free."""
    picture: list[int] = []
    for _ in range(grid.rows):
        picture += [-1] * grid.width + ([] if grid.row_end is None else [grid.row_end])
    picture += [] if grid.image_end is None else [grid.image_end]
    return picture[slot % len(picture)]


def sample_tokens(
    policy: Policy, setting: Setting, *, model: TokenModel | None = None, seed: int = 0
) -> Tensor:
    """`[N, L]` tokens, all rows in one batch."""
    n, branches = setting.samples, len(setting.cases[0])
    rows = [
        list(setting.cases[b % len(setting.cases)][g]) for g in range(branches) for b in range(n)
    ]
    prompt = make_prompt(rows, branches, layout=setting.grid)
    made = policy.sample(
        model or setting.language(),
        prompt,
        setting.length,
        filters=Filters(**setting.options),
        noise=Noise.from_seed(seed, n),
    )
    assert made.lengths.eq(setting.length).all()
    return made.tokens


def measure(
    policy: Policy, setting: Setting, *, model: TokenModel | None = None, seed: int = 0
) -> GTest:
    """Sample and test; results of different prompts are tested apart and combined."""
    tokens = sample_tokens(policy, setting, model=model, seed=seed)
    n_cases = len(setting.cases)
    test = combine(
        [
            g_test(count_sequences(tokens[k::n_cases], setting.vocab_size), setting.laws[k])
            for k in range(n_cases)
        ]
    )
    assert power(VISIBLE, setting.samples, test.degrees, LEVEL) >= POWER, test
    return test


def assert_exact(policy: Policy, setting: Setting, *, seed: int = 0) -> None:
    """The law is right, as far as this many samples can tell."""
    test = measure(policy, setting, seed=seed)
    assert test.p_value >= LEVEL, f"{policy}: {test}"


def assert_rejected(policy: Policy, setting: Setting, *, model: TokenModel | None = None) -> None:
    """The law is wrong, and the test sees it."""
    test = measure(policy, setting, model=model)
    assert test.p_value < LEVEL, f"{policy}: {test}"
