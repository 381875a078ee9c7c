"""Paths of a generation of nodes, read by a head at once (arXiv 2401.15077, section 4.2)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.samplers.drafting.contract import Paths
from mmaccel.samplers.drafting.heads.eagle_model import EagleModel, HeadCache, attend
from mmaccel.samplers.drafting.paths import cut_paths, find_paths


class HeadTree:
    """The paths that a head has read behind the last known token.

    Args:
        cache: of what is accepted; it stands before column `first`, and so does the last known
            token. The chain's drafts are written from there on.
        first: `[B, 1]` int64, the column of the chain's first draft as an entry.
        drafts: `[B, K]` int64, the chain without drafts that no draft follows.
        states: `[B, K + 1, C]`, of the last known token and of these drafts.
    """

    def __init__(
        self,
        head: EagleModel,
        cache: HeadCache,
        first: Tensor,
        drafts: Tensor,
        states: Tensor,
        *,
        depth: int,
    ) -> None:
        self._head = head
        self._cache = cache
        self._first = first
        self._states = states
        rows, n_drafts = drafts.shape
        number = torch.arange(n_drafts + 1, device=drafts.device)
        chain = F.pad(drafts, (0, depth - n_drafts))[:, None].expand(-1, n_drafts + 1, -1)
        self._paths = cut_paths(Paths(chain, number.expand(rows, -1)))  # [B, m, depth]
        columns = (first - 1 + number).clamp(min=0)  # the last known token's is never looked at
        index = columns[..., None, None].expand(-1, -1, *cache.keys.shape[2:])
        self._keys = cache.keys.gather(1, index)  # [B, m, Hkv, d]
        self._values = cache.values.gather(1, index)
        is_above = (number <= number[:, None]) & (number > 0)
        self._sees = is_above.expand(rows, -1, -1)  # [B, m, m], of its path, itself included

    def read(self, paths: Paths) -> Tensor:
        """States `[B, n, C]` after paths whose drafts but the last one were read before."""
        drafts = cut_paths(paths)  # [B, n, depth]
        rows = torch.arange(len(drafts), device=drafts.device)[:, None]
        last = (paths.depths - 1).clamp(min=0)[..., None]
        tokens = drafts.gather(2, last)[..., 0].clamp(min=0)
        above = find_paths(self._paths, drafts.scatter(2, last, -1)).at  # [B, n], without the last
        columns = (self._first + paths.depths - 1).clamp(min=0)
        entry = self._head.project(tokens, self._states[rows, above], columns)

        # what an entry sees: all that is accepted, its path, itself
        n = drafts.shape[1]
        at = torch.arange(self._cache.keys.shape[1], device=drafts.device)
        is_accepted = (at >= self._cache.first[:, None]) & (at < self._first)  # [B, S]
        is_self = torch.eye(n, dtype=torch.bool, device=drafts.device).expand(len(drafts), -1, -1)
        before = self._sees[rows, above]  # [B, n, m]
        mask = torch.cat([is_accepted[:, None].expand(-1, n, -1), before, is_self], 2)
        keys = torch.cat([self._keys, entry.keys], 1)
        values = torch.cat([self._values, entry.values], 1)
        attended = attend(
            entry.queries,
            torch.cat([self._cache.keys, keys], 1),
            torch.cat([self._cache.values, values], 1),
            mask,
        )
        states = self._head.add_mlp(entry.residual, attended)
        states = torch.where((paths.depths > 0)[..., None], states, self._states[:, :1])

        self._states = torch.cat([self._states, states], 1)
        self._keys = keys
        self._values = values
        self._paths = torch.cat([self._paths, drafts], 1)
        wider = F.pad(self._sees, (0, n))
        self._sees = torch.cat([wider, torch.cat([before, is_self], 2)], 1)
        return states
