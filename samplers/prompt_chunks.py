"""Prompts in chunks: which tokens of prompts the next pass processes.

SARATHI: A. Agrawal et al., "SARATHI: Efficient LLM Inference by Piggybacking Decodes with Chunked
Prefills", arXiv 2308.16369, section 4. Sarathi-Serve: A. Agrawal et al., "Taming
Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024 (arXiv 2403.02310),
section 4.2 (stall-free batching).

A prompt has a *cursor*: what stands before it is in the cache. A pass processes the next tokens of
the prompts that came first, at most a number of tokens, and the windows of all rows that decode
(`mmaccel.model_parts.MixedPasses`). A newcomer is admitted when the prompts before it leave room in
the chunk. So a long prompt keeps nobody waiting for longer than a chunk takes.

Departures: the number of tokens limits those of prompts alone, whatever the rows that decode take.
A row begins to decode in the pass with the last of its prompt, as its window sees what the pass has
written. Models without mixed passes process the chunk in a pass before that of the windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from mmaccel.contracts import Pass, TokenModel
from mmaccel.samplers.arithmetic import as_called


@dataclass
class Cursor:
    """How far the prompt of one row is processed, by branch.

    Attributes:
        ends: tokens that are processed before the row decodes: all but the last.
        prompts: these tokens, where a prefix tree is read; empty elsewhere.
        done: how many stand in the cache.
        waits: whether the prompt waits for another one, which begins with the same tokens.
    """

    ends: list[int]
    prompts: Sequence[tuple[int, ...]] = ()
    done: list[int] = field(init=False)
    waits: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self.done = [0] * len(self.ends)
        self.waits = [False] * len(self.ends)

    @property
    def remaining(self) -> list[int]:
        """Tokens that are not processed yet, by branch."""
        return [end - done for end, done in zip(self.ends, self.done, strict=True)]

    @property
    def wanted(self) -> list[int]:
        """As `remaining`, without those that wait."""
        pairs = zip(self.remaining, self.waits, strict=True)
        return [0 if waits else n_left for n_left, waits in pairs]


class Part(NamedTuple):
    """The next tokens of one prompt, which a chunk has.

    Attributes:
        row: number of its row.
        cursor: of the row.
        branch: its guidance branch.
        start: the first token.
        n: tokens; of prompts that are processed whole, with padding.
    """

    row: int
    cursor: Cursor
    branch: int
    start: int
    n: int


class PromptFeed:
    """The prompts that are not whole in the cache, in the order in which they came.

    Args:
        size: tokens of prompts that a step processes at most; None: whole prompts.

    Attributes:
        cursors: by number of the row.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.cursors: dict[int, Cursor] = {}

    def __len__(self) -> int:
        return len(self.cursors)

    @property
    def has_room(self) -> bool:
        """Whether the next chunk has room for another prompt."""
        if self.size is None:
            return True
        return sum(sum(cursor.wanted) for cursor in self.cursors.values()) < self.size

    def plan(self) -> list[Part]:
        """The parts of the next chunk; empty where there is nothing to process.

        The prompt that came first has all of its tokens, and others what it leaves. Without a size
        all prompts are processed whole, as wide as the longest.
        """
        if self.size is None:
            return self._plan_whole()
        left = self.size
        parts = []
        for row, cursor in self.cursors.items():
            for branch, n_wanted in enumerate(cursor.wanted):
                n = min(n_wanted, left)
                if n:
                    parts.append(Part(row, cursor, branch, cursor.done[branch], n))
                    left -= n
        return parts

    def _plan_whole(self) -> list[Part]:
        wanted = [n for cursor in self.cursors.values() for n in cursor.wanted]
        width = max(wanted, default=0)
        if not width:
            return []
        # without a prefix tree all begin alike, those without tokens to process included
        return [
            Part(row, cursor, branch, cursor.done[branch], width)
            for row, cursor in self.cursors.items()
            for branch, n_left in enumerate(cursor.wanted)
            if n_left or not cursor.prompts
        ]

    def advance(self, parts: Sequence[Part]) -> None:
        """Move the cursors behind a chunk that was processed, or is in the next pass."""
        for part in parts:
            end = part.cursor.ends[part.branch]
            part.cursor.done[part.branch] = min(part.start + part.n, end)

    def take_whole(self) -> list[int]:
        """The rows whose prompts are whole, which leave."""
        whole = [row for row, cursor in self.cursors.items() if not any(cursor.remaining)]
        for row in whole:
            del self.cursors[row]
        return whole


def count_prompts(model: TokenModel, tokens: Tensor) -> int:
    """How many rows of prompts `[R, N]` a model processes: of those with the same prompt one,
    where they share it.
    """
    prefixes = model.setup.prefixes
    return len(tokens) if prefixes is None else len(prefixes.rows)


@as_called()
def prefill_together(model: TokenModel, tokens: Tensor, lengths: Tensor, size: int | None) -> int:
    """Process prompts that begin together, chunk by chunk.

    Args:
        model: after `reserve`.
        tokens: `[R, N]` int64, at least one column.
        lengths: `[R]` int64, entries of each row.
        size: tokens of all rows in a pass at most, but one of each at least; None: one pass.

    Returns:
        How many passes it took.
    """
    n_columns = tokens.shape[1]
    width = n_columns
    if size is not None:
        n_columns = int(lengths.max())
        width = max(size // count_prompts(model, tokens), 1)
    starts = range(0, n_columns, width)
    for first in starts:
        part = tokens[:, first : first + width].clamp(min=0)
        start = lengths.new_full((1,), first).expand_as(lengths)
        model.prefill(Pass(part, start, lengths=lengths - first, opens=first == 0))
    return len(starts)
