"""A toy language small enough to enumerate: the next token's logits depend on the whole prefix, through a table.

The model keeps what it was fed, position by position, so that a sampler that forgets to roll back, or feeds the wrong
position, reads the wrong prefix.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from mmaccel.contracts import Prompt


class ToyLanguage:
    """Logits from a random table over prefixes (rolling polynomial hash, collision-free at these sizes)."""

    def __init__(self, vocab_size: int = 3, seed: int = 0, spread: float = 1.5, depth: int = 7) -> None:
        self.vocab_size, self.depth = vocab_size, depth
        self.device = torch.device("cpu")
        generator = torch.Generator().manual_seed(seed)
        n_prefixes = sum(vocab_size**k for k in range(depth + 1))
        self.table = spread * torch.randn(n_prefixes, vocab_size, generator=generator)
        self.passes = 0
        self.widths: list[int] = []

    def reserve(self, rows: int, positions: int) -> None:
        self.memory = torch.full((rows, positions), -1, dtype=torch.int64)

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        assert tokens.dtype == torch.int64 and tokens.shape[0] == self.memory.shape[0]
        assert int(tokens.min()) >= 0 and int(tokens.max()) < self.vocab_size
        rows, width = tokens.shape
        positions = start[:, None] + torch.arange(width)
        written = self.memory >= 0
        assert bool(written.int().cumprod(1).sum(1).ge(start).all()), "a hole was left in the cache"
        self.memory.scatter_(1, positions, tokens)
        self.passes += 1
        self.widths.append(width)
        return torch.stack([self.logits_after(self.memory, positions[:, w]) for w in range(width)], 1)

    def logits_after(self, memory: Tensor, last: Tensor) -> Tensor:
        """Logits `[R, V]` after the prefixes `memory[r, : last[r] + 1]`, of which the last `depth` tokens count."""
        code = torch.zeros_like(last)
        for back in range(self.depth - 1, -1, -1):
            position = last - back
            token = memory.gather(1, position.clamp(min=0)[:, None])[:, 0]
            code = torch.where(position >= 0, code * self.vocab_size + token + 1, code)
        return self.table[code]


def make_prompt(rows: list[list[int]], branches: int = 1, **others) -> Prompt:
    """Right-pad lists of tokens."""
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return Prompt(tokens, torch.tensor([len(row) for row in rows]), branches, **others)


def enumerate_law(model: ToyLanguage, prompts: list[list[int]], length: int, law_of) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of `length` tokens.

    Args:
        model: the language.
        prompts: one prompt per guidance branch.
        law_of: list of raw logits, one `[V]` per branch, to a list of V probabilities; written by hand in the test.
    """
    law = {}
    for sequence in itertools.product(range(model.vocab_size), repeat=length):
        p = 1.0
        for i, token in enumerate(sequence):
            raw = []
            for prompt in prompts:
                memory = torch.tensor([prompt + list(sequence[:i])])
                raw.append(model.logits_after(memory, torch.tensor([memory.shape[1] - 1]))[0])
            p *= float(law_of(raw)[token])
        law[sequence] = p
    return law
