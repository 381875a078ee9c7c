"""Paths through a tree of drafts, by which drafters find what they made of them before."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.samplers.drafting.contract import Paths

_NONE = -1  # behind the end of a path


class Found(NamedTuple):
    """Where paths are among those that are known."""

    at: Tensor  # [B, n] int64, 0 for one that is not there
    is_known: Tensor  # [B, n] bool


def cut_paths(paths: Paths) -> Tensor:
    """The drafts on paths, `[B, n, W-1]` int64; -1 behind the end of each."""
    slot = torch.arange(paths.tokens.shape[2], device=paths.tokens.device)
    return paths.tokens.masked_fill(slot >= paths.depths[..., None], _NONE)


def find_paths(known: Tensor, paths: Tensor) -> Found:
    """Find paths `[B, n, W-1]` among known ones `[B, m, W-1]`, both from `cut_paths`."""
    is_same = (known[:, None] == paths[:, :, None]).all(-1)  # [B, n, m]
    return Found(is_same.long().argmax(-1), is_same.any(-1))
