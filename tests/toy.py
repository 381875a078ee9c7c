"""A toy language small enough to enumerate: the next token's logits depend on the whole prefix.

The model keeps what it was fed, position by position, so that a sampler that forgets to roll back,
or feeds the wrong position, reads the wrong prefix.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from tests.recorder import Feeds

LawOf = Callable[[list[list[float]], int], list[float]]
"""(raw logits of every branch, slot) -> probabilities."""


class ToyLanguage(Feeds):
    """Logits from a random table over prefixes (rolling hash, collision-free at these sizes)."""

    def __init__(
        self, vocab_size: int = 3, seed: int = 0, spread: float = 1.5, depth: int = 7
    ) -> None:
        self.vocab_size, self.depth = vocab_size, depth
        self.device = torch.device("cpu")
        generator = torch.Generator().manual_seed(seed)
        n_prefixes = sum(vocab_size**k for k in range(depth + 1))
        self.table = spread * torch.randn(n_prefixes, vocab_size, generator=generator)
        self.passes = 0
        self.widths: list[int] = []

    def reserve(self, rows: int, positions: int) -> None:
        self.room = positions
        self.memory = torch.full((rows, positions + 1), -1, dtype=torch.int64)  # the last: scratch

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        assert tokens.dtype == torch.int64 and tokens.shape[0] == self.memory.shape[0]
        assert int(tokens.min()) >= 0 and int(tokens.max()) < self.vocab_size
        width = tokens.shape[1]
        positions = start[:, None] + torch.arange(width)
        written = self.memory >= 0
        needed = start.clamp(max=self.room)
        assert bool(written.int().cumprod(1).sum(1).ge(needed).all()), "a hole is in the cache"
        beyond = positions >= self.room
        positions = positions.clamp(max=self.room)
        self.memory.scatter_(1, positions, tokens)
        self.passes += 1
        self.widths.append(width)
        logits = [self.logits_after(self.memory, positions[:, w]) for w in range(width)]
        return torch.stack(logits, 1).masked_fill(beyond[..., None], float("nan"))  # mean nothing

    def logits_after(self, memory: Tensor, last: Tensor) -> Tensor:
        """Logits `[R, V]` after the prefixes `memory[r, : last[r] + 1]`; `depth` tokens count."""
        code = torch.zeros_like(last)
        for back in range(self.depth - 1, -1, -1):
            position = last - back
            token = memory.gather(1, position.clamp(min=0)[:, None])[:, 0]
            code = torch.where(position >= 0, code * self.vocab_size + token + 1, code)
        return self.table[code]

    def logits_of(self, prefix: Sequence[int]) -> list[float]:
        """Logits after one prefix, for loops written by hand."""
        memory = torch.tensor([list(prefix)])
        return self.logits_after(memory, torch.tensor([len(prefix) - 1]))[0].tolist()


def make_prompt(rows: list[list[int]], branches: int = 1, **others) -> Prompt:
    """Right-pad lists of tokens."""
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return Prompt(tokens, torch.tensor([len(row) for row in rows]), branches, **others)


def law_by_hand(
    scale: float = 1.0,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    allowed: Sequence[int] | Callable[[int], Sequence[int]] | None = None,
    forced: Callable[[int], int] | None = None,
) -> LawOf:
    """The filters again, in plain floats and loops, in the order the library promises."""

    def law(raw: list[list[float]], slot: int) -> list[float]:
        scores = list(raw[0])
        if len(raw) == 2:
            scores = [u + scale * (c - u) for c, u in zip(raw[0], raw[1])]
        size = len(scores)
        if forced is not None and forced(slot) >= 0:
            return [float(v == forced(slot)) for v in range(size)]
        here = allowed(slot) if callable(allowed) else allowed
        alive = [v for v in range(size) if here is None or v in here]
        if temperature == 0:
            best = max(alive, key=lambda v: (scores[v], -v))
            return [float(v == best) for v in range(size)]
        weight = {v: math.exp(scores[v] / temperature) for v in alive}
        falling = sorted(alive, key=lambda v: -weight[v])
        if top_k is not None:
            falling = falling[:top_k]
        if top_p is not None:
            total, mass, kept = sum(weight[v] for v in falling), 0.0, []
            for v in falling:
                if mass < top_p * total:
                    kept.append(v)
                mass += weight[v]
            falling = kept
        if min_p is not None:
            falling = [v for v in falling if weight[v] >= min_p * weight[falling[0]]]
        total = sum(weight[v] for v in falling)
        return [weight[v] / total if v in falling else 0.0 for v in range(size)]

    return law


def enumerate_law(
    model: ToyLanguage, prompts: list[list[int]], length: int, law_of: LawOf
) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of `length` tokens, in the order of `itertools.product`.

    Args:
        model: the language.
        prompts: one prompt per guidance branch.
        length: L.
        law_of: written by hand, see `law_by_hand`.
    """
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for slot in range(length):
        longer = {}
        for prefix in itertools.product(range(model.vocab_size), repeat=slot):
            weights = [0.0] * model.vocab_size
            if law[prefix] > 0:
                raw = [model.logits_of([*prompt, *prefix]) for prompt in prompts]
                weights = law_of(raw, slot)
            for token, p in enumerate(weights):
                longer[(*prefix, token)] = law[prefix] * p
        law = longer
    return law
