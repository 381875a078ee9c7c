"""Rows whose prompts are read in several ways, alone and in runs with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import (
    CausalLMWindow,
    ContinuousBatching,
    Jacobi,
    Noise,
    PrefixTree,
    SamplingParams,
)
from mmaccel.contracts import FinishedRow, Pass, Prompt
from mmaccel.model_parts import PromptPiece
from mmaccel.policies import Policy
from mmaccel.results import Generation
from tests.fixtures.arriving import Arriving
from tests.fixtures.tiny_lms import VOCAB, build_lm
from tests.fixtures.toy_models import make_prompt

Patch = pytest.MonkeyPatch


def ids(n: int, seed: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (n,), generator=random).tolist()


class Watched(CausalLMWindow):
    """Keeps the shape of every pass: of prompts, of windows, and of both with those of pieces."""

    def __init__(
        self,
        name: str = "llama",
        size: int | None = None,
        dtype: torch.dtype = torch.float32,
        apart: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(build_lm(name).to(dtype), **options)
        self.setup.prefill_chunk_size = size
        self.seen: list[tuple[Any, ...]] = []
        self.last_logits = torch.empty(0)
        self.apart = apart

    def lack(self, word: str, part: Any = None) -> str:
        return "a test" if self.apart and word == "mixed passes" else super().lack(word, part)

    def prefill(self, entries: Pass) -> None:
        self.seen.append(("prompt", *entries.tokens.shape))
        super().prefill(entries)

    def forward(self, entries: Pass) -> Tensor:
        self.seen.append(("window", *entries.tokens.shape))
        self.last_logits = super().forward(entries)
        return self.last_logits

    def forward_mixed(self, entries: Pass, pieces: Sequence[PromptPiece]) -> Tensor:
        sizes = tuple(len(piece.tokens) for piece in pieces)
        self.seen.append(("mixed", *entries.tokens.shape, sizes))
        self.last_logits = super().forward_mixed(entries, pieces)
        return self.last_logits

    @property
    def prompts(self) -> list[tuple[Any, ...]]:
        """Rows and width of the passes over prompts."""
        return [shape for kind, *shape in self.seen if kind == "prompt"]


@dataclass(frozen=True, eq=False)
class Texts:
    """Prompts, and how they are decoded.

    Attributes:
        prompts: of rows 0, 1, …
        others: of their unconditional branches.
        length: L.
        policy: P.
    """

    prompts: list[list[int]]
    others: list[list[int]]
    length: int
    policy: Policy

    def read(self, rows: list[int], scale: float = 1.0, width: int = 0) -> Prompt:
        """The prompt of some rows, with room for a longer one."""
        tokens = [self.prompts[row] for row in rows]
        tokens += [self.others[row] for row in rows] * (scale != 1)
        return make_prompt(tokens, 1 + (scale != 1), width)

    def decode(
        self, window: Any, rows: list[int], batching: ContinuousBatching | None = None, *,
        policy: Policy | None = None, scale: float = 1.0, width: int = 0, on_step: Any = None,
        length: int = 0,
    ) -> Generation:  # fmt: skip
        """Some rows."""
        return (policy or self.policy).sample(
            window,
            replace(self.read(rows, scale, width), batching=batching),
            length or self.length,
            params=SamplingParams(guidance_scale=scale),
            noise=Noise.from_seed([100 + row for row in rows], len(rows)),
            on_step=on_step,
        )

    def decode_joined(
        self, window: Any, first: list[int], others: list[int], most: int = 4,
        tree: PrefixTree | None = None, scale: float = 1.0, **given: Any,
    ) -> tuple[Generation, list[FinishedRow]]:  # fmt: skip
        """Some rows begin, and the others join, one after another pass."""
        ended: list[FinishedRow] = []
        arriving = Arriving([*others], lambda rows: self.read(rows, scale), 2, most=1)
        batching = ContinuousBatching(most, ended.append, arriving if others else None, tree)
        width = max(map(len, self.prompts))
        made = self.decode(window, first, batching, scale=scale, width=width, **given)
        assert not arriving.waiting
        return made, ended

    def assert_alone(
        self, given: list[FinishedRow], rows: list[int], scale: float = 1.0, length: int = 0,
        **options: Any,
    ) -> None:  # fmt: skip
        """Rows 0, 1, … of a run are `rows`, with the tokens and passes of each alone."""
        assert sorted(row.row for row in given) == list(range(len(rows)))
        for row in given:
            own = alone(self, rows[row.row], scale, length, **options)
            assert row.tokens.tolist() == own.tokens[0].tolist(), f"row {row.row}"
            assert row.passes == own.stats.passes


@cache
def alone(
    texts: Texts, row: int, scale: float = 1.0, length: int = 0, **options: Any
) -> Generation:
    """A row with a prompt of its own, read as a whole; `options` are of `Watched`."""
    return texts.decode(Watched(**options), [row], scale=scale, length=length)


SYSTEM = ids(24, 1)
# two questions after one beginning, the same with another seed, its beginning alone, another prompt
PROMPTS = [SYSTEM + ids(5, 2), SYSTEM + ids(9, 3), SYSTEM + ids(5, 2), SYSTEM[:17], ids(13, 4)]
N_PROMPTS = 28 + 32 + 28 + 16 + 12  # tokens that are processed before rows decode
ALIKE = Texts(PROMPTS, [[4, 5, 6, 7]] * 5, 12, Jacobi(4))
ALL = [0, 1, 2, 3, 4]


def open_tree(max_tokens: int = 1000, chunk_size: int = 4) -> PrefixTree:
    return PrefixTree(max_tokens, chunk_size=chunk_size, least=2)
