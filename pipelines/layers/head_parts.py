"""Heads that hold different numbers of entries: who shares memory, and attention over it.

A layer is split into parts of heads that kept about equally many entries, in eighths of what the
longest head kept, so that a part has room for little more than it holds. A pass writes to all parts
and attends part by part. Within a part a shorter head has empty indices between what it kept and
what passes write, which a mask hides. Later entries stand at one index in all heads of a part, so
that a rollback is overwriting, as in any store.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.pipelines.layers.store import HeadPart, WindowLayer

_STEPS = 8


def split_heads(
    layer: WindowLayer, keep: Tensor, lengths: Tensor, ends: Tensor, *,
    surplus: int = 0, n_next: int | None = None,
) -> int:  # fmt: skip
    """Let a layer keep chosen entries of each head.

    Args:
        layer: of the cache; its memory is freed for that of its parts.
        keep: `[R, H, K]` int64, cache indices in ascending order; shorter lists end in -1.
        lengths: `[R]` int64, entries of each row; where all stay, nothing is done.
        ends: `[R]` int64, positions of the entries that passes write next.
        surplus: cache indices of the layout that are no longer needed.
        n_next: the most entries that passes write before the layer is split anew, which it is in
            any case. None: it never is.

    Returns:
        How many stay, over all rows and heads.

    Cost: host synchronisations, and a copy of what stays.
    """
    counts = (keep >= 0).sum(-1)  # [R, H]
    n_kept = int(counts.sum())
    if n_next is None and n_kept == int(lengths.sum()) * counts.shape[1]:
        return n_kept
    most = counts.amax(0)
    step = ((most * _STEPS).float() / most.max()).ceil()
    parts = []
    for one in step.unique().flip(0):
        heads = (step == one).nonzero()[:, 0]
        held = counts[:, heads]
        n_held = held.amax(1)  # [R]
        store = layer.take_heads(heads.to(keep.device))
        dropped = ends - n_held.to(ends.device)
        room = layer.layout.max_length - surplus - int(dropped.min())
        if n_next is not None:  # the last index is scratch
            room = min(room, int(n_held.max()) + n_next + 1)
        layout = layer.layout.shorten(dropped, room)
        store.evict(keep[:, heads, : int(n_held.max())], layout)
        parts.append(HeadPart(heads, store, held))
    layer.split(parts)
    return n_kept


def join_heads(made: list[Tensor], parts: tuple[HeadPart, ...]) -> Tensor:
    """`[R, H, …]` of what was made of the heads of each part, `[R, n, …]`."""
    heads = torch.cat([part.heads for part in parts])
    order = heads.argsort()
    return torch.cat(made, 1)[:, order.to(made[0].device)]


def read_heads(layer: WindowLayer, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the heads of a layer of parts hold, without what is empty.

    Args:
        layer: of parts.
        ends: `[R]` int64, positions before which entries are read.

    Returns:
        Keys and values `[R, H, S, D]`, and how many of these each head has, `[R, H]` int64.
    """
    parts = layer.parts
    counts = [part.count(ends) for part in parts]
    size = max(int(count.max()) for count in counts)
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for part in parts:
        held = part.store.held()
        index = part.to_index(torch.arange(size, device=part.counts.device))
        index = index.clamp(max=held[0].shape[2] - 1).to(held[0].device)[..., None]
        for states, one in zip(held, found, strict=True):
            one.append(states.gather(2, index.expand(-1, -1, -1, states.shape[3])))
    return join_heads(found[0], parts), join_heads(found[1], parts), join_heads(counts, parts)
