"""Reference models: distributions small enough for a table, so that every probability is known.

`ToyLanguage` reads logits from a table over prefixes: a sampler that forgets to roll back reads the
wrong one. `ReferenceDenoiser` knows every conditional of a joint distribution, in any order;
`ToyScales` those of scales, too.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass, Denoiser, Pass, Prompt, TokenModel
from mmaccel.evaluation.exactness.g_test import GTest, count_sequences, g_test
from mmaccel.model_parts import ScalePasses
from mmaccel.samplers.drafting.states import StateModel
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams

LENGTH, VOCAB = 5, 3


class ReferenceDenoiser(Denoiser):
    """A joint distribution `[V] * L`, float64, over L slots of V tokens; id V is the mask token."""

    any_rows = True
    device = torch.device("cpu")

    def __init__(self, joint: Tensor) -> None:
        self.joint = joint.double() / joint.sum()
        self.length, self.n_tokens = joint.ndim, joint.shape[0]
        self.vocab_size, self.mask_token = self.n_tokens + 1, self.n_tokens
        self.passes = 0
        self.table = torch.tensor(
            list(product(range(self.n_tokens), repeat=self.length)), dtype=torch.int64
        )

    def reserve(self, rows: int, cache_size: int) -> None:
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


class ToyLanguage(TokenModel, StateModel):
    """Sequences of 5 ids of 0..2 behind a prompt of one token, of probabilities `joint`; logits are
    the hidden states.
    """

    vocab_size = VOCAB
    device = torch.device("cpu")

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        joint = torch.ones(1, dtype=torch.float64)
        self.tables = []  # of slot t: [V ** t, V] logits behind every prefix
        for slot in range(LENGTH):
            logits = 1.5 * torch.randn(VOCAB**slot, VOCAB, generator=generator, dtype=torch.float32)
            self.tables.append(logits)
            joint = (joint[:, None] * logits.double().softmax(-1)).flatten()
        self.joint = joint.view((VOCAB,) * LENGTH)

    def keep_states(self, wanted: bool) -> None: ...

    def output_matrix(self) -> Tensor:
        return torch.eye(VOCAB, dtype=torch.float32)

    def vectors(self, kind: str) -> Tensor | None:
        """The middle one lies near the two others, which are apart."""
        if kind == "codes":
            return None
        return torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]], dtype=torch.float32)

    def reserve(self, rows: int, positions: int) -> None:
        self._tokens = torch.zeros(rows, positions + 1, dtype=torch.int64)  # and those past the end

    def prefill(self, entries: Pass) -> None:
        self._write(entries)

    def forward(self, entries: Pass) -> Tensor:
        """Logits `[R, W, 3]` float32, 0 past the end."""
        positions = self._write(entries)  # [R, W]; position t is that of slot t's prefix' last
        logits = torch.zeros(*positions.shape, VOCAB, dtype=torch.float32)
        code = torch.zeros_like(self._tokens[:, 0])  # of the prefix, in base V
        for slot, table in enumerate(self.tables):
            if slot and slot < self._tokens.shape[1]:
                code = code * VOCAB + self._tokens[:, slot]
            is_here = positions == slot
            logits = torch.where(is_here[..., None], table[code][:, None], logits)
        self.last_states = logits
        return logits

    def _write(self, entries: Pass) -> Tensor:
        assert entries.start is not None
        positions = entries.start[:, None] + torch.arange(entries.tokens.shape[1])
        positions = positions.clamp(max=self._tokens.shape[1] - 1)
        self._tokens.scatter_(1, positions, entries.tokens)
        return positions


class ToyScales(ReferenceDenoiser, ScalePasses):
    """Images of two scales of sides 1 and 2, of ids 0..2: the four tokens of the second depend on
    the first one alone.
    """

    lengths, grids = (1, 4), ((1, 1), (2, 2))

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.first = torch.randn(1, VOCAB, generator=generator, dtype=torch.float64)
        self.second = 1.5 * torch.randn(VOCAB, 4, VOCAB, generator=generator, dtype=torch.float64)
        given_first = self.second.softmax(-1).unbind(1)
        super().__init__(
            torch.einsum("a,ab,ac,ad,ae->abcde", self.first[0].softmax(-1), *given_first)
        )

    def lack(self, word: str, part: Any = None) -> str:
        return "" if word == "scales" else super().lack(word, part)

    def begin(self, prompt: Prompt) -> None: ...

    def restart(self, rows: Tensor, prompt: Prompt) -> None: ...

    def forward_scale(
        self, scale: int, before: Tensor | None, rows: Tensor | None, around: Any
    ) -> tuple[Tensor, int]:
        n_rows = self.rows if rows is None else len(rows)
        some = self.first.expand(n_rows, 1, -1) if before is None else self.second[before[:, 0]]
        no_mask = some.new_full((*some.shape[:2], 1), float("-inf"))
        return torch.cat([some, no_mask], -1), some.shape[1]


def sample_distribution(policy: Any, kind: str, samples: int, seed: int = 0) -> GTest:
    """Sample a toy under a policy, in one batch, and compare the counts with its distribution."""
    model: Any = ToyScales() if "scales" in getattr(policy, "needs", ()) else ToyLanguage()
    joint = model.joint
    if model.kind != kind:
        model = ReferenceDenoiser(joint)
    ones = torch.ones(samples, 1, dtype=torch.int64)
    made = policy.sample(
        model,
        Prompt(ones, ones[:, 0]),
        LENGTH,
        params=SamplingParams(),
        noise=Noise.from_seed(seed, samples),
    )
    return g_test(count_sequences(made.tokens.clamp(0, VOCAB - 1), VOCAB), joint.flatten())
