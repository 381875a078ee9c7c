"""A language small enough to enumerate: is the law of what a policy decodes the model's own?

Logits come from a table over prefixes, so that a sampler that forgets to roll back, or feeds the
wrong position, reads the wrong prefix. The law of every whole sequence is a product of softmaxes;
counts of sampled sequences are held against it by `mmaccel.evaluation.exactness.g_test`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.evaluation.exactness import GTest, count_sequences, g_test
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise

LENGTH, VOCAB = 5, 3
_DEPTH = 7  # tokens that count: the prompt and all others
_PROMPT = (1, 2)


class ToyLanguage:
    """A `TokenModel` over ids 0..2 whose logits depend on all tokens before.

    Args:
        seed: of the table.
        spread: standard deviation of the logits.
    """

    vocab_size = VOCAB
    device = torch.device("cpu")

    def __init__(self, seed: int = 1, spread: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        n_prefixes = (VOCAB + 1) ** _DEPTH  # digit 0: nothing stands there
        self.table = spread * torch.randn(n_prefixes, VOCAB, generator=generator)

    def reserve(self, rows: int, positions: int) -> None:
        """See `mmaccel.contracts.TokenModel.reserve`."""
        self._room = positions
        self._memory = torch.full((rows, positions + 1), -1)  # the last: beyond the room

    def feed(self, tokens: Tensor, start: Tensor) -> None:
        """See `mmaccel.contracts.TokenModel.feed`."""
        self._write(tokens, start)

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        """Logits `[R, W, 3]` float32; see `mmaccel.contracts.TokenModel.forward`."""
        places = self._write(tokens, start)
        return torch.stack([self.logits_after(self._memory, p) for p in places.unbind(1)], 1)

    def logits_after(self, memory: Tensor, last: Tensor) -> Tensor:
        """Logits `[R, 3]` after the prefixes `memory[r, : last[r] + 1]`."""
        code = torch.zeros_like(last)
        for back in range(_DEPTH - 1, -1, -1):
            place = last - back
            token = memory.gather(1, place.clamp(min=0)[:, None])[:, 0]
            code = code * (VOCAB + 1) + torch.where(place >= 0, token + 1, 0)
        return self.table[code]

    def _write(self, tokens: Tensor, start: Tensor) -> Tensor:
        places = start[:, None] + torch.arange(tokens.shape[1])
        places = places.clamp(max=self._room)
        self._memory.scatter_(1, places, tokens)
        return places

    def law(self) -> Tensor:
        """Probability of each sequence of 5 tokens behind the prompt, `[243]` float64, in the order
        of `itertools.product`.
        """
        chances = []
        for tokens in product(range(VOCAB), repeat=LENGTH):
            line = torch.tensor([[*_PROMPT, *tokens]])
            chance = 1.0
            for slot, token in enumerate(tokens):
                last = torch.tensor([len(_PROMPT) + slot - 1])
                chance *= float(self.logits_after(line, last)[0].double().softmax(-1)[token])
            chances.append(chance)
        return torch.tensor(chances, dtype=torch.float64)


def sample_law(policy: Any, samples: int, seed: int = 0) -> GTest:
    """Sample the language under a policy and hold the counts against its law.

    Args:
        policy: one that decodes a window.
        samples: rows of one batch, so that rows advance differently.
        seed: of all draws.
    """
    model = ToyLanguage()
    prompt = Prompt(
        torch.tensor(_PROMPT).expand(samples, -1).contiguous(),
        torch.full((samples,), len(_PROMPT)),
    )
    made = policy.sample(
        model, prompt, LENGTH, filters=Filters(), noise=Noise.from_seed(seed, samples)
    )
    return g_test(count_sequences(made.tokens, VOCAB), model.law())
