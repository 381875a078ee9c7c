"""Oracles: joint laws small enough for a table, as denoisers that know every conditional."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass


class OracleDenoiser:
    """A joint law over L slots of V tokens; id V is the mask token.

    Args:
        joint: `[V] * L`, non-negative, float64.
    """

    block: int | None = None
    has_store, any_rows = False, True
    mask_token: int | None

    def __init__(self, joint: Tensor) -> None:
        self.joint = joint.double() / joint.sum()
        self.length, self.n_tokens = joint.ndim, joint.shape[0]
        self.vocab_size, self.mask_token = self.n_tokens + 1, self.n_tokens
        self.passes = 0
        self.table = torch.tensor(list(product(range(self.n_tokens), repeat=self.length)))

    @property
    def device(self) -> torch.device:
        """The processor."""
        return torch.device("cpu")

    def reserve(self, rows: int, places: int) -> None:
        """See `mmaccel.canvas_contracts.Denoiser.reserve`."""
        self.rows = rows

    def forward(self, entries: CanvasPass) -> Tensor:
        """Logarithms of the joint's conditionals, float64; of what cannot be: -inf everywhere."""
        self.passes += 1
        canvas = entries.tokens[:, -self.length :]  # [R, L]
        agrees = (canvas[:, None] == self.table) | (canvas[:, None] == self.mask_token)
        weight = agrees.all(-1) * self.joint.flatten()  # [R, V ** L]
        is_token = torch.nn.functional.one_hot(self.table, self.vocab_size).double()
        mass = torch.einsum("rk,klv->rlv", weight, is_token)
        slots = entries.queries - (entries.tokens.shape[1] - self.length)
        index = slots.clamp(0)[..., None].expand(-1, -1, self.vocab_size)
        return mass.gather(1, index).log()


def families(length: int = 4, n_tokens: int = 3, seed: int = 0) -> dict[str, Tensor]:
    """Joint laws `[V] * L`, float64, of six kinds: slots that know nothing of each other, a chain,
    noisy copies, permutations, one slot changed, and a few templates (after W. Kang et al.,
    "ParallelBench", 2025, arXiv 2510.04767).
    """
    rng = torch.Generator().manual_seed(seed)

    def law(*shape: int, sharp: float = 1.5) -> Tensor:
        return (sharp * torch.randn(*shape, generator=rng, dtype=torch.float64)).softmax(-1)

    table = list(product(range(n_tokens), repeat=length))
    shape = (n_tokens,) * length
    single = law(length, n_tokens)
    independent = _exactly([_prod(single[i, x] for i, x in enumerate(row)) for row in table])
    first, step = law(n_tokens), law(n_tokens, n_tokens)
    markov = _exactly(
        [first[r[0]] * _prod(step[a, b] for a, b in zip(r, r[1:], strict=False)) for r in table]
    )
    noise = 0.05
    half = length // 2
    copies = _exactly(
        [
            _prod(
                (1 - noise if r[i] == r[i + half] else noise) * single[i, r[i]] for i in range(half)
            )
            for r in table
        ]
    )
    pattern = [k % n_tokens for k in range(length)]
    shuffles = set(permutations(pattern))
    shuffle = _exactly([float(r in shuffles) for r in table])
    base = tuple([0] * length)
    changed = {base[:i] + (v,) + base[i + 1 :] for i in range(length) for v in range(1, n_tokens)}
    replace = _exactly([float(r in changed) for r in table])
    picks = torch.randperm(len(table), generator=rng)[:3].tolist()
    templates = _exactly(
        [0.01 / len(table) + (0.33 if k in picks else 0) for k in range(len(table))]
    )
    laws = {
        "independent": independent,
        "markov": markov,
        "copy pairs": copies,
        "shuffle": shuffle,
        "replace one": replace,
        "templates": templates,
    }
    return {name: value.double().view(shape) / value.sum() for name, value in laws.items()}


def _exactly(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _prod(values) -> float:  # type: ignore[no-untyped-def]
    result = 1.0
    for value in values:
        result *= float(value)
    return result
