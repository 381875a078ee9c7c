"""The early end: the first slot that surely holds an end token is committed at once.

A canvas is made longer than the answers it is for, and most of it then holds end tokens, each of
which would be committed like any other. Bao et al., "Learning to Parallel: Accelerating Diffusion
Large Language Models via Learnable Parallel Decoding", 2025, arXiv 2509.25188, cut it where the end
is predicted (EoTP).

Departures: cutting is an option of its own (`drop_suffix`); the end has to be likely enough, all
end tokens together, not only the likeliest slot for it; the slot's token is drawn like any other's,
so that a row ends only where an end token was drawn; per row.

Settled: everything that is open, once what the model expects there stays and is sure.

Source: the stopping criterion "stable and confident" of DiffusionGemma in transformers 5.23.

Departures: there the likeliest tokens of the whole canvas end it; here a row's open slots of the
active block are committed as they are drawn, and the ledger charges them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.checks import check_number
from mmaccel.errors import OptionError
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.selector import LogitsOnly, SelectorState


@dataclass(frozen=True)
class EosThreshold(LogitsOnly):
    """The first open slot of the active block whose end tokens have `threshold` together.

    Where a row has no end token left to be found, nothing.
    """

    threshold: float = 0.9

    def __post_init__(self) -> None:
        check_number("end_threshold", self.threshold, 0, 1, "0.9 is usual, None waits")

    def select(self, seen: SlotPredictions, memory: SelectorState) -> Tensor:
        """See `Selector`."""
        ends = memory.run.canvas.stop_tokens
        assert ends is not None
        ends = ends[ends < seen.law.shape[-1]].unique()
        chance = seen.law.softmax(-1)[..., ends].sum(-1)  # [B, Q]
        sure = seen.is_open & (chance >= self.threshold)
        return sure & (sure.cumsum(1) == 1)

    def rank(self, seen: SlotPredictions) -> Tensor:
        """See `Selector`; the first slot first."""
        return -seen.slots.float()


def check_ends(stop_tokens: Tensor | None, vocab_size: int) -> None:
    """Refuse a row that no token ends.

    Raises:
        OptionError: with the remedy.
    """
    if stop_tokens is None or not bool((stop_tokens < vocab_size).any()):
        raise OptionError(
            "end_threshold, drop_suffix: expected a prompt with stop tokens among the model's ids, "
            "received none; give the model an end token, or leave both out"
        )


@dataclass(frozen=True)
class ConvergedBlock(LogitsOnly):
    """All open slots of a row's active block, where no likeliest token has changed since the pass
    before and the slots' entropies are below `entropy` nats on average; none otherwise.
    """

    entropy: float = 0.005

    def __post_init__(self) -> None:
        check_number("settled", self.entropy, 0, float("inf"), "0.005 is usual, None waits")

    def select(self, seen: SlotPredictions, memory: SelectorState) -> Tensor:
        """See `Selector`."""
        likeliest = seen.law.argmax(-1)  # [B, Q]
        before = memory.kept.get(self, likeliest.new_full(likeliest.shape, -1))
        memory.kept[self] = likeliest
        stays = ((likeliest == before) | ~seen.is_open).all(1) & ~memory.moved
        spread = torch.where(seen.is_open, seen.entropy, 0.0).sum(1)
        sure = spread < self.entropy * seen.is_open.sum(1)
        return seen.is_open & (stays & sure)[:, None]

    def rank(self, seen: SlotPredictions) -> Tensor:
        """See `Selector`."""
        return seen.peak
