"""Prompts in chunks: which tokens of prompts the next pass processes.

SARATHI: A. Agrawal et al., "SARATHI: Efficient LLM Inference by Piggybacking Decodes with Chunked
Prefills", arXiv 2308.16369, section 4. Sarathi-Serve: A. Agrawal et al., "Taming
Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024 (arXiv 2403.02310),
section 4.2 (stall-free batching).

A prompt has a *cursor*: what stands before it is in the cache. A pass processes the next tokens of
the prompts that came first, at most a number of tokens, and the windows of all rows that decode
(`mmaccel.model_parts.MixedPasses`). Newcomers are admitted when there is room in the chunk.

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
    """How far the prompt of one row is processed, by branch."""

    ends: list[int]  # tokens that are processed before the row decodes: all but the last
    prompts: Sequence[tuple[int, ...]] = ()  # these tokens, where a prefix tree is read
    done: list[int] = field(init=False)  # how many stand in the cache
    waits: list[bool] = field(init=False)  # for another prompt that begins with the same tokens

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
    """The next tokens of one prompt, which a chunk has."""

    row: int  # its number in the prompt
    cursor: Cursor  # of the row
    branch: int
    start: int  # the first token
    n: int  # tokens; of prompts that are processed whole, with padding


class PromptFeed:
    """The prompts that are not whole in the cache, by number of the row, in the order in which they
    came. A step processes at most `size` tokens of them; None: whole prompts.
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
        """The parts of the next chunk: all tokens of the prompt that came first, of others what it
        leaves; without a size whole prompts, as wide as the longest.
        """
        if self.size is None:
            return self._plan_whole()
        room = self.size
        parts = []
        for row, cursor in self.cursors.items():
            for branch, n_wanted in enumerate(cursor.wanted):
                n = min(n_wanted, room)
                if n:
                    parts.append(Part(row, cursor, branch, cursor.done[branch], n))
                    room -= n
        return parts

    def _plan_whole(self) -> list[Part]:
        widths = [n for cursor in self.cursors.values() for n in cursor.wanted]
        width = max(widths, default=0)
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
    """How many rows of prompts `[R, N]` a model processes: of those that share a prompt one."""
    prefixes = model.setup.prefixes
    return len(tokens) if prefixes is None else len(prefixes.rows)


@as_called()
def prefill_together(model: TokenModel, tokens: Tensor, lengths: Tensor, size: int | None) -> int:
    """Process prompts `[R, N]` that begin together, in passes of `size` tokens of all rows, at
    least one of each (None: one pass); how many passes it took.
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
