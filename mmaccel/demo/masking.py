"""Masked training: which slots are hidden, the loss there, and the mask that lets all look at all.

Absorbing-state diffusion: Austin et al., 2021, arXiv 2107.03006; Nie et al., 2025, arXiv
2502.09992. Departures: the number of hidden slots is drawn, not each slot's coin, and the numbers
are spread evenly over a batch, as Sahoo et al., 2024, arXiv 2406.07524, spread continuous times.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mmaccel.demo.token_pool import IGNORE


def draw_counts(rng: np.random.Generator, rows: int, slots: int) -> np.ndarray:
    """How many slots each row hides, int64 [rows]: each uniform on 1..slots, together even.

    With as many rows as slots, every number comes once.
    """
    shares = (rng.permutation(rows) + rng.random()) / rows
    return (shares * slots).astype(np.int64) + 1


def hide(slots: Tensor, counts: np.ndarray, rng: np.random.Generator) -> Tensor:
    """Chooses which slots to hide.

    Args:
        slots: [B, T] bool, those that may be hidden.
        counts: [B], how many; at most as many as the row has.
        rng: draws them.

    Returns:
        [B, T] bool on the CPU, `counts[b]` of row b's slots.
    """
    keys = rng.random(tuple(slots.shape))
    keys[~slots.cpu().numpy()] = 2.0
    ranks = keys.argsort(axis=1).argsort(axis=1)
    return torch.from_numpy(ranks < counts[:, None])


def see_all(valid: Tensor) -> Tensor:
    """Additive attention mask under which every position looks at every valid one.

    Args:
        valid: [B, T] bool.

    Returns:
        [B, 1, T, T] float32, 0 or the lowest number. transformers' models take a mask of four
        dimensions as it is, so a causal model given this one looks both ways.
    """
    mask = torch.zeros(valid.shape, device=valid.device)
    mask.masked_fill_(~valid, torch.finfo(torch.float32).min)
    return mask[:, None, None, :].expand(-1, 1, valid.shape[1], -1)


def hidden_losses(
    model: Any, ids: Tensor, hidden: Tensor, *, mask_id: int, pad_id: int, shift: int
) -> Tensor:
    """Cross-entropy of each hidden token, in nats.

    Args:
        model: a causal LM of transformers.
        ids: [B, T] int64, the whole truth, padded.
        hidden: [B, T] bool, what the model does not see.
        mask_id: stands in the hidden places.
        pad_id: of padding, which nobody looks at.
        shift: where the logits of position i stand: at i - shift.

    Returns:
        [N] float32, row by row.
    """
    seen = ids.masked_fill(hidden, mask_id)
    states = model.model(
        input_ids=seen, attention_mask=see_all(ids != pad_id), use_cache=False
    ).last_hidden_state
    states = states[:, : ids.shape[1] - shift][hidden[:, shift:]]
    return cross_entropy(model.lm_head(states).float(), ids[hidden], reduction="none")


def masked_loss(losses: Tensor, hidden: Tensor, power: float = 1.0) -> Tensor:
    """One number to descend.

    Args:
        losses: of `hidden_losses`.
        hidden: [B, T] bool, at least one in each row.
        power: a row with n hidden slots weighs n ** (1 - power). At 1 rows weigh the same and the
            expectation is the bound on the negative log-likelihood per slot, which is also the
            mean loss of decoding one slot a step in random order; at 0 tokens weigh the same.

    Returns:
        Scalar, nats per slot.
    """
    counts = hidden.sum(1)
    rows = counts.float() ** (1 - power)
    weights = (rows / rows.sum() / counts).repeat_interleave(counts)
    return (losses * weights).sum()


def slots_of(labels: Tensor) -> Tensor:
    """[B, T] bool: the slots that may be hidden, which are those with a label."""
    return labels != IGNORE
