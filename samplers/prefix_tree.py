"""PrefixTree: the beginnings of prompts that were processed, for prompts that begin alike.

L. Ye, Z. Tao, Y. Huang, Y. Li, "ChunkAttention: Efficient Self-Attention with Prefix-Aware KV Cache
and Two-Phase Partition", ACL 2024 (arXiv:2402.15220), section 3.1: keys and values of prompts are
stored in chunks of equally many tokens; a chunk is a node of a tree, in which prompts that begin
alike share a path. A new prompt is looked up along its path, and only what follows is processed.

Departures: ChunkAttention's kernel reads the chunks themselves; here a row attends to a copy in its
own cache, or, of longer beginnings and on demand, rows share one until the last has ended
(`pipelines.hosts.layers.shared_prefix`). The least recently used chunks go for others. Part of a
chunk may be found; the last chunk of a prompt may be short.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmaccel.capabilities import Option
from mmaccel.checks import ANY_INT, check_int

Entries = Sequence[tuple[Tensor, Tensor]]
"""Of every layer, keys and values `[H, n, D]` of n tokens that follow each other."""


PREFIX_TREE = Option("prefix_tree", frozenset({"copied entries"}))
"""A tree as a part of a run."""


@dataclass(eq=False)
class Chunk:
    """A node: some tokens that follow those of its parent, at most as many as a chunk has."""

    tokens: tuple[int, ...] = ()
    parent: Chunk | None = None  # None of the root, which has no tokens
    entries: Entries = ()  # of the tokens
    children: dict[tuple[int, ...], Chunk] = field(default_factory=dict)

    def find(self, tokens: tuple[int, ...]) -> tuple[Chunk, int] | None:
        """The child with the longest common beginning, and its length; None where it is empty."""
        exact = self.children.get(tokens)
        if exact is not None:
            return exact, len(tokens)
        lengths = [(count_common(child, tokens), child) for child in self.children]
        longest, child = max(lengths, default=(0, ()))
        return (self.children[child], longest) if longest else None


@dataclass(frozen=True)
class Match:
    """The beginning of a prompt that a tree holds: its chunks, and how many tokens of each."""

    parts: Sequence[tuple[Chunk, int]]

    @property
    def length(self) -> int:
        return sum(length for _, length in self.parts)

    def entries(self) -> Entries:
        layers = []
        for chunks in zip(*(chunk.entries for chunk, _ in self.parts), strict=True):
            keys, values = (  # [H, length, D]
                torch.cat([part[:, :n] for part, (_, n) in zip(states, self.parts, strict=True)], 1)
                for states in zip(*chunks, strict=True)
            )
            layers.append((keys, values))
        return layers


class PrefixTree:
    """Keys and values of the beginnings of prompts, which several runs may use in turn.

    Args:
        max_tokens: that it holds at most; each takes its keys and values in all layers.
        chunk_size: tokens of a chunk.
        least: a common beginning of fewer tokens is not worth a copy.
        shared_from: beginnings of so many tokens are stored once for all rows (not in captured
            steps, nor where all layers slide); None: copies.
    """

    def __init__(
        self,
        max_tokens: int = 65536,
        *,
        chunk_size: int = 64,
        least: int = 16,
        shared_from: int | None = None,
    ) -> None:
        check_int("max_tokens", max_tokens, 1, ANY_INT, hint="try 65536")
        check_int("chunk_size", chunk_size, 1, hint="try 64")
        check_int("least", least, 1, hint="try 16")
        if shared_from is not None:
            check_int("shared_from", shared_from, 1, hint="try 1024")
        self.max_tokens = max_tokens
        self.chunk_size = chunk_size
        self.least = least
        self.shared_from = shared_from
        self.n_read = 0  # tokens that prompts have taken from it
        self.n_evicted = 0  # tokens that had to go for others
        self._key: Hashable = None
        self.clear()

    def clear(self) -> None:
        """Forget all prompts; what was counted stays."""
        self.n_tokens = 0  # that it holds
        self._root = Chunk()
        self._used: OrderedDict[Chunk, None] = OrderedDict()  # each after all that follow it

    @property
    def n_bytes(self) -> int:
        """Of all keys and values."""
        entries = [pair for chunk in self._used for pair in chunk.entries]
        return sum(keys.nbytes + values.nbytes for keys, values in entries)

    def open(self, key: Hashable) -> None:
        """Begin a run; what another key has left is forgotten, as entries depend on it."""
        if key != self._key:
            self.clear()
            self._key = key

    def match(self, tokens: tuple[int, ...]) -> Match:
        """The longest beginning of a prompt that it holds; empty where that is below `least`."""
        node = self._root
        parts: list[tuple[Chunk, int]] = []
        n_found = 0
        while n_found < len(tokens):
            child = node.find(tokens[n_found : n_found + self.chunk_size])
            if child is None:
                break
            parts.append(child)
            node, length = child
            n_found += length
            if length < self.chunk_size:
                break
        if n_found < self.least:
            return Match(())
        self._touch(node)
        return Match(parts)

    def insert(self, tokens: tuple[int, ...], copy: Callable[[int, int], Entries]) -> None:
        """Hold what there is room for of a prompt; `copy` copies entries from token to token."""
        node = self._root
        tokens = tokens[: self.max_tokens]
        for first in range(0, len(tokens), self.chunk_size):
            chunk_tokens = tokens[first : first + self.chunk_size]
            child = node.find(chunk_tokens)
            if child is not None and child[1] == len(chunk_tokens):
                node = child[0]
                continue
            if child is not None and child[1] == len(child[0].tokens):
                self._remove(child[0])  # a short chunk, which the new one begins with
            chunk = Chunk(chunk_tokens, node, copy(first, first + len(chunk_tokens)))
            node.children[chunk_tokens] = chunk
            node = chunk
            self.n_tokens += len(chunk_tokens)
        self._touch(node)
        while self.n_tokens > self.max_tokens:
            oldest = next(iter(self._used))
            self.n_evicted += len(oldest.tokens)
            self._remove(oldest)

    def _touch(self, node: Chunk) -> None:
        """Count a chunk and those before it as used now; the first one is the last to go."""
        while node.parent is not None:
            self._used[node] = None
            self._used.move_to_end(node)
            node = node.parent

    def _remove(self, chunk: Chunk) -> None:
        """Forget a chunk that nothing follows."""
        assert chunk.parent is not None and not chunk.children
        del chunk.parent.children[chunk.tokens]
        self._used.pop(chunk, None)
        self.n_tokens -= len(chunk.tokens)


def count_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens two prompts have in common from their beginning on."""
    low = 0
    high = min(len(one), len(other))
    while low < high:  # they agree before `low`, and do not before `high + 1`
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
