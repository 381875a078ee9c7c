"""The blocks that a model's drafts for itself attend to (`samplers/drafting/self_draft.py`).

Blocks chosen once a round are *held*: its drafts read them, the first block, and those written
since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.kernels.choose_blocks import choose_highest
from mmaccel.kernels.window_attention import Blocks
from mmaccel.pipelines.hosts.layers.sparse import BlockChooser, SparseBlocks
from mmaccel.reduction.sparse_attention.contract import AttentionMethod

if TYPE_CHECKING:
    from mmaccel.samplers.drafting.self_draft import SelfDrafting


class DraftBlocks:
    """Chooses for the passes of one run whose model drafts for itself."""

    def __init__(self, source: SelfDrafting) -> None:
        attention = source.attention
        self._held = HeldBlocks()
        self._is_held = source.is_held
        self._method: MethodBlocks | None = None
        self._verified: VerifiedBlocks | None = None
        if isinstance(attention, AttentionMethod):
            self._method = MethodBlocks(attention, self._held)
        else:
            self._verified = VerifiedBlocks(self._held, attention.budget, attention.block)

    @property
    def verifying(self) -> BlockChooser | None:
        """Looks at a verifying pass, which attends to everything; None where nothing has to."""
        return self._verified

    def drafting(self, index: int) -> BlockChooser:
        """Chooses for a draft before which the round had `index` others."""
        if self._method is None or (self._is_held and index > 0):
            return self._held
        self._method.is_first = index == 0
        return self._method


class HeldBlocks(BlockChooser):
    """Blocks that are held for a round; before the first one every draft attends to everything."""

    def __init__(self) -> None:
        # by layer: blocks [R, H, n], and the first one [R] that is not among them
        self._held: dict[int, tuple[Blocks, Tensor]] = {}

    def hold(self, layer: int, chosen: Tensor, first: Tensor, size: int) -> None:
        """Hold chosen blocks `[R, H, N]` bool, of `size` entries, before the open `first` `[R]`."""
        block = torch.arange(chosen.shape[2], device=chosen.device)
        chosen = chosen & (block < first[:, None])[:, None]
        count = chosen.sum(-1)
        n_most = int(count.max())
        index = chosen.to(torch.uint8).topk(n_most, -1).indices  # those that are chosen come first
        self._held[layer] = Blocks(index.int(), count.int(), size), first

    def choose(
        self, layer: int, query: Tensor, key: Tensor, start: Tensor, *, scale: float
    ) -> Blocks | None:
        if layer not in self._held:
            return None
        blocks, first = self._held[layer]
        if len(first) != len(start):  # rows have gone
            return None
        # a row that was cut goes on before what is held of it
        begin = torch.minimum(first, start // blocks.size)
        last = (start + query.shape[2] - 1) // blocks.size
        n_recent = int((last - begin).max()) + 1
        recent = begin[:, None] + torch.arange(n_recent, device=begin.device)  # [R, n]
        recent = recent.int()[:, None].expand(-1, blocks.index.shape[1], -1)
        return Blocks(torch.cat([recent, blocks.index], -1), blocks.count + n_recent, blocks.size)


class MethodBlocks(BlockChooser):
    def __init__(self, method: AttentionMethod, held: HeldBlocks) -> None:
        self._blocks = SparseBlocks(method)
        self._held = held
        self._rounds: dict[int, tuple[Tensor, Tensor]] = {}  # [R], where the last two began
        self.is_first = True  # whether the draft is the first of its round

    def choose(
        self, layer: int, query: Tensor, key: Tensor, start: Tensor, *, scale: float
    ) -> Blocks | None:
        before, begin = self._rounds.get(layer, (start, start))
        if len(before) != len(start):  # rows have gone
            before = begin = start
        if self.is_first:
            before, begin = begin, start
            self._rounds[layer] = before, begin
        # the verifying pass has written since the round before began
        since = torch.minimum(before, start)
        blocks = self._blocks.choose(layer, query, key, start, scale=scale, since=since)
        if blocks is None:
            return None
        n_blocks = -(-key.shape[2] // blocks.size)
        rank = torch.arange(blocks.index.shape[2], device=key.device)
        is_listed = rank < blocks.count[..., None]
        chosen = torch.zeros(*blocks.index.shape[:2], n_blocks, dtype=torch.bool, device=key.device)
        chosen.scatter_(2, blocks.index.long(), is_listed)
        self._held.hold(layer, chosen, start // blocks.size, blocks.size)
        return blocks


class VerifiedBlocks(BlockChooser):
    """Holds the blocks that a verifying pass attends to most, a fraction `budget` of a row's."""

    def __init__(self, held: HeldBlocks, budget: float, size: int) -> None:
        self._held = held
        self._budget = budget
        self._size = size

    def choose(
        self, layer: int, query: Tensor, key: Tensor, start: Tensor, *, scale: float
    ) -> None:
        mass = find_mass(query, key, start, scale)  # [R, H, S]
        n_blocks = -(-key.shape[2] // self._size)
        mass = pad(mass, (0, n_blocks * self._size - key.shape[2]))
        scores = mass.unflatten(2, (n_blocks, -1)).sum(-1)  # [R, H, N]
        scores[..., 0] = float("inf")  # the first block is read in any case
        first = start // self._size
        n_chosen = (first * self._budget).ceil().long().clamp(min=1)[:, None, None]
        most = min(int(n_blocks * self._budget) + 1, n_blocks)
        block = torch.arange(n_blocks, device=key.device)
        scores = scores.masked_fill((block >= first[:, None])[:, None], -1.0)
        self._held.hold(layer, choose_highest(scores, n_chosen, most), first, self._size)


def find_mass(query: Tensor, key: Tensor, start: Tensor, scale: float) -> Tensor:
    """`[R, H, S]` float32, the attention that each key receives from all queries of its head."""
    heads = key.shape[1]
    packed = query.unflatten(1, (heads, -1))  # [R, H, G, W, D]
    scores = (packed.flatten(2, 3) @ key.mT).float().mul_(scale)  # [R, H, G W, S]
    entry = torch.arange(query.shape[2], device=key.device)
    ends = (start[:, None] + entry).repeat(1, packed.shape[2])  # [R, G W], of what a query sees
    hidden = torch.arange(key.shape[2], device=key.device) > ends[..., None]
    scores.masked_fill_(hidden[:, None], float("-inf"))
    return scores.softmax(-1).sum(2)
