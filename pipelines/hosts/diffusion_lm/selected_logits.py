"""Logits of some positions of a pass: the head runs on these alone; scales and caps still apply."""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def queried_logits(model: Any, queries: Tensor, *args: Any, **inputs: Any) -> Tensor:
    """Logits `[R, Q, V]` of positions `[R, Q]` int64 of ``model(*args, **inputs)``.

    A head that is no linear layer called once on states `[R, N, D]` computes all positions.
    """
    selected: list[bool] = []  # whether the head was called on the queries
    thread = get_ident()

    def select(_: nn.Module, states: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if get_ident() != thread:  # a pass of another thread
            return None
        if states[0].ndim != 3 or states[0].shape[0] != queries.shape[0]:
            return None
        selected.append(True)
        return gather_rows(states[0], queries), *states[1:]

    head = getattr(model, "get_output_embeddings", lambda: None)()
    hook = head.register_forward_pre_hook(select) if isinstance(head, nn.Linear) else None
    try:
        logits: Tensor = model(*args, **inputs).logits
    finally:
        if hook is not None:
            hook.remove()
    return logits if selected else gather_rows(logits, queries)


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """`values` `[R, N, D]` at `index` `[R, Q]` int64, `[R, Q, D]`."""
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[-1]))
