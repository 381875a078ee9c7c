"""Training through masks: absorbing-state diffusion, Austin et al., 2021, arXiv 2107.03006; Nie et
al., 2025, arXiv 2502.09992.

Departures: the number of hidden slots is drawn, not each slot's coin, and the numbers are spread
evenly over a batch, as Sahoo et al., 2024, arXiv 2406.07524, spread continuous times.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from scripts.training.loop import IGNORE, Task

_TRAIN, _CHECK = 1, 2


class Masked(Task):
    """A task whose labels are hidden slots, run with a mask that hides nothing but padding.

    Attributes:
        mask_id: stands in the hidden places.
        pad_id: of padding, which no position attends to.
        shift: where the logits of position i stand: at i - shift.
    """

    mask_id: int
    pad_id: int
    shift = 0

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        return self.bound(model, ids, labels, np.random.default_rng((_TRAIN, step)))

    def validate(self, model: Any, device: str) -> dict[str, float]:
        """The bound on the negative log-likelihood per slot; fixed masks."""
        found = [
            self.bound(model, ids.to(device), labels.to(device), np.random.default_rng((_CHECK, k)))
            for k, (ids, labels) in enumerate(self.checks)
        ]
        return {"validation": float(torch.stack(found).mean())}

    def bound(self, model: Any, ids: Tensor, labels: Tensor, rng: np.random.Generator) -> Tensor:
        """Cross-entropy of hidden tokens, in nats, the mean over a row's and then over rows: its
        expectation bounds the negative log-likelihood per slot, and is the mean loss of decoding
        one slot a step in random order.
        """
        slots = labels != IGNORE
        hidden = hide(slots, draw_counts(rng, len(ids), int(slots[0].sum())), rng)
        states = model.model(
            input_ids=ids.masked_fill(hidden, self.mask_id),
            attention_mask=see_all(ids != self.pad_id),
            use_cache=False,
        ).last_hidden_state
        states = states[:, : ids.shape[1] - self.shift][hidden[:, self.shift :]]
        losses = cross_entropy(model.lm_head(states).float(), ids[hidden], reduction="none")
        counts = hidden.sum(1)
        return (losses / counts.repeat_interleave(counts)).sum() / len(ids)


def draw_counts(
    rng: np.random.Generator, rows: int, slots: int | np.ndarray, power: float = 1.0
) -> np.ndarray:
    """How many slots each row hides, int64 [rows]: each uniform on 1..slots, together even; with a
    `power` below 1, rather more.

    With as many rows as slots, every number comes once.
    """
    shares = (rng.permutation(rows) + rng.random()) / rows
    return (shares**power * slots).astype(np.int64) + 1


def hide(slots: Tensor, counts: np.ndarray, rng: np.random.Generator) -> Tensor:
    """Of each row `counts[b]` of the slots [B, T] bool that may be hidden, drawn by `rng`."""
    keys = rng.random(tuple(slots.shape))
    keys[~slots.cpu().numpy()] = 2.0
    ranks = keys.argsort(axis=1).argsort(axis=1)
    return torch.from_numpy(ranks < counts[:, None]).to(slots.device)


def see_all(valid: Tensor) -> Tensor:
    """Additive attention mask [B, 1, T, T] under which every position attends to every valid one
    of [B, T]. transformers' models take a mask of four dimensions as it is, so a causal model
    given this one attends both ways.
    """
    mask = torch.zeros(valid.shape, device=valid.device)
    mask.masked_fill_(~valid, torch.finfo(torch.float32).min)
    return mask[:, None, None, :].expand(-1, 1, valid.shape[1], -1)
