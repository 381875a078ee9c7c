"""Items of a batch: one image each, with a seed of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmaccel.errors import OptionError

SEEDS = 2**64


@dataclass(frozen=True)
class Row:
    """One row of a prompt file, checked.

    Attributes:
        id: unique in the file; letters, digits, `.`, `_` and `-`.
        prompt: the caption.
        negative: what the unconditional branch says instead of the model's own; "" leaves that,
            None takes the command line's.
        seed: of its first image; None takes one from the id.
        n: number of images.
        size: width and height in pixels; None is the model's own.
        policy: short name; None is that of the command line.
        params: fields of filters and policy, over those of the command line.
        line: where it stands in the file, from 1.
    """

    id: str
    prompt: str
    negative: str | None = None
    seed: int | None = None
    n: int = 1
    size: tuple[int, int] | None = None
    policy: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    line: int = 0


@dataclass(frozen=True)
class Item:
    """One image to be made.

    Attributes:
        row: what it is an image of.
        k: which of the row's images, from 0.
        seed: 0..2**64-1.
    """

    row: Row
    k: int
    seed: int

    @property
    def key(self) -> tuple[str, int]:
        """What tells items of a file apart."""
        return self.row.id, self.k

    @property
    def file(self) -> str:
        """Name of its image."""
        return f"{self.row.id}_{self.k}_{self.seed}.png"


def seed_of(base: int, id: str, k: int) -> int:
    """The seed of image k of a row: 64 bits of SHA-256 over (base, id, k).

    It depends on nothing else: not on the order of rows, their number, shards or batches.

    Args:
        base: the seed of the job, 0..2**64-1.
        id: of the row.
        k: from 0.
    """
    text = json.dumps([base % SEEDS, id, k])
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")


def make_items(rows: Iterable[Row], base: int) -> list[Item]:
    """All images of a file, row by row.

    Args:
        rows: checked ones.
        base: the seed of the job. A row with a seed s of its own has s, s + 1, ... instead.

    Raises:
        OptionError: a seed of more than 64 bits, which would be that of another job.
    """
    if not -(2**63) <= base < SEEDS:
        raise OptionError(
            f"--seed: expected a 64-bit integer, received {base}; take it modulo 2**64"
        )
    items = []
    for row in rows:
        for k in range(row.n):
            own = seed_of(base, row.id, k) if row.seed is None else (row.seed + k) % SEEDS
            items.append(Item(row, k, own))
    return items


def take_shard(items: list[Item], index: int, count: int) -> list[Item]:
    """Part `index` of 1..`count` parts of like size; together they are all items, each once."""
    return items[index - 1 :: count]
