"""The canvas: which slots of each row hold which tokens, and where each row's active block is."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from mmaccel.contracts import Layout, Prompt
from mmaccel.errors import OptionError

PER_ROW = (
    "tokens",
    "is_committed",
    "is_given",
    "limit",
    "start",
    "base",
    "end",
    "block_commits",
    "stays_in_block",
    "_offset",
)


class Canvas:
    """Slots of B rows, L each, in blocks of `block`; None takes the canvas as one. Tokens that the
    prompt's layout forces are committed from the start. Blocks of the model's own (`is_own`) count
    from a row's first token; those of `lengths` follow each other from the first slot on.

    A row's active block, `start` to `end`, is the first with an open slot; both are `limit` where
    none is open. A stop token does not shorten it, so that passes attend to as much as before.
    """

    def __init__(
        self,
        prompt: Prompt,
        length: int,
        mask_token: int | None,
        block: int | None,
        is_own: bool = False,
        lengths: tuple[int, ...] | None = None,
    ) -> None:
        batch = prompt.batch
        device = prompt.tokens.device
        self.length, self.mask_token = length, mask_token
        self._blank = 0 if mask_token is None else mask_token
        # [B, L] int64, the mask token where nothing is committed
        self.tokens = torch.full((batch, length), self._blank, device=device, dtype=torch.int64)
        self.is_committed = torch.zeros(batch, length, dtype=torch.bool, device=device)  # [B, L]
        # [B] int64, slots that count: up to the first stop token, once there is one
        self.limit = torch.full((batch,), length, device=device, dtype=torch.int64)
        self.drop_suffix = prompt.slots is not None  # passes leave out the slots from `limit` on
        if prompt.slots is not None:
            self.cut(prompt.slots)
        self.stop_tokens = prompt.stop_tokens
        self.slots = torch.arange(length, device=device)
        self._block = block
        self._bases = None  # [L], where the block of a slot begins, of blocks of unequal lengths
        if lengths is not None:
            sizes = self.slots.new_tensor(lengths)
            self._bases = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
            self._ends = self._bases + sizes.repeat_interleave(sizes)
        self._offset = torch.zeros_like(self.limit)  # by which a row's first block is shorter
        if is_own and block is not None:
            self._offset = prompt.lengths[:batch] % block
        self._commit_forced(prompt.layout, batch)
        self.is_given = self.is_committed.clone()  # [B, L]: nothing may change these
        self.start = torch.full_like(self.limit, -1)  # [B] int64, as `end`
        # `base` is where the active block begins, prompt tokens in it counted: `start`, or below 0
        self.base, self.end = self.start.clone(), self.start.clone()
        self.block_commits = torch.zeros_like(self.limit)  # since the active block began
        self.stays_in_block = torch.zeros_like(self.limit, dtype=torch.bool)  # though it is full
        self.blocks_are_adjacent = False  # a block begins at the first open slot, not on a grid
        self.update_blocks()

    def _commit_forced(self, layout: Layout | None, batch: int) -> None:
        slots = self.slots.expand(batch, -1)
        forced = None if layout is None else layout.forced(slots)
        if forced is None:
            return
        forced = forced.expand(batch, -1)
        if self.mask_token is not None and bool((forced == self.mask_token).any()):
            raise OptionError(
                f"layout: expected tokens that may stand in the result, received the mask token "
                f"{self.mask_token} in a forced slot; give -1 where a slot is open"
            )
        self.is_committed = forced >= 0
        self.tokens = torch.where(self.is_committed, forced, self.tokens)

    @property
    def is_open(self) -> Tensor:
        """`[B, L]` bool, slots still to be committed."""
        return ~self.is_committed & (self.slots < self.limit[:, None])

    @property
    def lengths(self) -> Tensor:
        """`[B]` int64, slots that hold a token and count."""
        return (self.is_committed & (self.slots < self.limit[:, None])).sum(1)

    @property
    def is_live(self) -> Tensor:
        """`[B]` bool, rows that take part in the next pass."""
        return self.is_open.any(1) | self.stays_in_block

    def active(self) -> Tensor:
        """`[B, L]` bool, open slots of the active block."""
        inside = (self.slots >= self.start[:, None]) & (self.slots < self.end[:, None])
        return self.is_open & inside

    def commit(self, chosen: Tensor, tokens: Tensor) -> Tensor:
        """Put tokens `[B, L]` into chosen `[B, L]` open slots; returns how many, `[B]` int64."""
        chosen = chosen & self.is_open
        self.tokens = torch.where(chosen, tokens, self.tokens)
        self.is_committed = self.is_committed | chosen
        n_new = chosen.sum(1)
        self.block_commits = self.block_commits + n_new
        return n_new

    def reopen(self, chosen: Tensor) -> None:
        """Make committed slots `[B, L]` bool open again; given ones stay."""
        chosen = chosen & self.is_committed & ~self.is_given
        self.tokens = torch.where(chosen, self._blank, self.tokens)
        self.is_committed = self.is_committed & ~chosen

    def replace(self, chosen: Tensor, tokens: Tensor) -> None:
        """Put other tokens into committed slots `[B, L]` bool; given ones stay."""
        chosen = chosen & self.is_committed & ~self.is_given
        self.tokens = torch.where(chosen, tokens, self.tokens)

    def spread(self, slots: Tensor, values: Tensor, rest: int | bool) -> Tensor:
        """Values `[B, Q]` of slots as `[B, L]`, `rest` elsewhere; slots from L on are dropped."""
        wide = values.new_full((values.shape[0], self.length + 1), rest)
        return wide.scatter_(1, slots.clamp(max=self.length), values)[:, : self.length]

    def cut(self, limit: Tensor) -> None:
        """End rows at `limit` `[B]` int64 where that is less."""
        self.limit = torch.minimum(self.limit, limit)

    def cut_at_stop_tokens(self) -> None:
        if self.stop_tokens is not None:
            stops = (self.tokens[..., None] == self.stop_tokens).any(-1) & self.is_committed
            self.cut(torch.where(stops, self.slots + 1, self.length).amin(1))

    def shorten_block(self, end: Tensor) -> None:
        """End active blocks at `end` `[B]` int64 where that is less; with `blocks_are_adjacent`."""
        self.end = torch.maximum(torch.minimum(self.end, end), self.start)

    def update_blocks(self) -> Tensor:
        """Cut rows at stop tokens, go on from full blocks; which rows have another active block."""
        self.cut_at_stop_tokens()
        is_open = self.is_open
        first = torch.where(is_open, self.slots, self.limit[:, None]).amin(1)  # [B]
        base = torch.zeros_like(first)
        end = torch.full_like(first, self.length)
        if self._block is not None:
            base = (first + self._offset) // self._block * self._block - self._offset
            end = (base + self._block).clamp(max=self.length)
        if self._bases is not None:
            at = first.clamp(max=self.length - 1)
            base, end = self._bases[at], self._ends[at]
        if self.blocks_are_adjacent:
            inside = first < self.end
            base = torch.where(inside, self.base, first)
            end = first + (self.length if self._block is None else self._block)
            end = torch.where(inside, self.end, end).clamp(max=self.length)
        self.stays_in_block = self.stays_in_block & (self.start < self.limit)
        base, end = (torch.where(is_open.any(1), x, self.limit) for x in (base, end))
        base = torch.where(self.stays_in_block, self.base, base)
        end = torch.where(self.stays_in_block, self.end, end)
        is_new = base != self.base
        self.base = base
        self.start = base.clamp(min=0)
        self.end = torch.maximum(end, self.start)
        self.block_commits = torch.where(is_new, 0, self.block_commits)
        return is_new

    def copies(self, n: int) -> Canvas:
        """These rows n times, `[n * B]`; changing them changes nothing here."""
        new = copy(self)
        for name in PER_ROW:
            value = getattr(self, name)
            setattr(new, name, value.repeat(n, *(1,) * (value.ndim - 1)))
        return new

    def take(self, others: Canvas, index: Tensor) -> None:
        """Take over one of several copies (`[n * B]` rows, from `copies`), row by row."""
        batch = index.shape[0]
        rows = index * batch + torch.arange(batch, device=index.device)
        for name in PER_ROW:
            setattr(self, name, getattr(others, name)[rows])
