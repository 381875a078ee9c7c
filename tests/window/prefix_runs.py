"""Rows that begin alike, alone and in runs with a prefix tree."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from mmaccel import (
    CausalLMWindow,
    ContinuousBatching,
    Jacobi,
    Noise,
    PrefixTree,
    SamplingParams,
)
from mmaccel.contracts import FinishedRow, Pass, Prompt
from mmaccel.results import Generation
from tests.fixtures.arriving import Arriving
from tests.fixtures.tiny_lms import VOCAB, build_lm
from tests.fixtures.toy_models import make_prompt

LENGTH = 12
Patch = pytest.MonkeyPatch
Prompts = list[list[int]]


def ids(n: int, seed: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (n,), generator=random).tolist()


SYSTEM = ids(24, 1)
# two questions after one beginning, the same with another seed, its beginning alone, another prompt
PROMPTS = [SYSTEM + ids(5, 2), SYSTEM + ids(9, 3), SYSTEM + ids(5, 2), SYSTEM[:17], ids(13, 4)]
OTHERS = [[4, 5, 6, 7]] * 5  # of their unconditional branches
N_PROMPTS = 28 + 32 + 28 + 16 + 12  # tokens that are processed before rows decode


class Watched(CausalLMWindow):
    """Keeps the shape of every pass over prompts."""

    def __init__(
        self, name: str = "llama", dtype: torch.dtype = torch.float64, **options: Any
    ) -> None:
        super().__init__(build_lm(name).to(dtype), **options)
        self.seen: list[tuple[int, int]] = []

    def prefill(self, entries: Pass) -> None:
        self.seen.append((entries.tokens.shape[0], entries.tokens.shape[1]))
        super().prefill(entries)


def open_tree(max_tokens: int = 1000, chunk_size: int = 4, least: int = 2) -> PrefixTree:
    return PrefixTree(max_tokens, chunk_size=chunk_size, least=least)


def prompt(rows: list[int], scale: float = 1.0, width: int = 0) -> Prompt:
    tokens = [PROMPTS[row] for row in rows] + [OTHERS[row] for row in rows] * (scale != 1)
    made = make_prompt(tokens, 1 + (scale != 1))
    pad = max(0, width - made.tokens.shape[1])
    return replace(made, tokens=torch.nn.functional.pad(made.tokens, (0, pad)))


def decode(
    window: CausalLMWindow, rows: list[int], batching: ContinuousBatching | None = None, *,
    scale: float = 1.0, width: int = 0, on_step: Any = None, tree: Any = None,
) -> Generation:  # fmt: skip
    return Jacobi(4, tree=tree).sample(
        window,
        replace(prompt(rows, scale, width), batching=batching),
        LENGTH,
        params=SamplingParams(guidance_scale=scale),
        noise=Noise.from_seed([100 + row for row in rows], len(rows)),
        on_step=on_step,
    )


def decode_joined(
    window: CausalLMWindow, tree: PrefixTree | None, *,
    first: int = 1, most: int = 5, scale: float = 1.0, on_step: Any = None,
) -> tuple[Generation, list[FinishedRow]]:  # fmt: skip
    """Some rows begin, and the others join, one after another pass."""
    given: list[FinishedRow] = []
    arriving = Arriving([*range(first, 5)], lambda rows: prompt(rows, scale), 2, most=1)
    joins = arriving if first < 5 else None
    batching = ContinuousBatching(most, given.append, joins, tree)
    made = decode(window, [*range(first)], batching, scale=scale, width=33, on_step=on_step)
    assert not arriving.waiting
    return made, given


@cache
def decode_alone(
    row: int, scale: float, dtype: torch.dtype = torch.float64, name: str = "llama"
) -> Generation:
    """A row with a prompt of its own."""
    return decode(Watched(name, dtype), [row], scale=scale)


def assert_alone(
    given: list[FinishedRow],
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
    name: str = "llama",
) -> None:
    """Rows have the tokens and passes of each alone."""
    assert sorted(row.row for row in given) == [0, 1, 2, 3, 4]
    for row in given:
        own = decode_alone(row.row, scale, dtype, name)
        assert row.tokens.tolist() == own.tokens[0].tolist(), f"row {row.row}"
        assert row.passes == own.stats.passes
