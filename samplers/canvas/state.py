"""The canvas: which slots of each row hold what, and where each row's active block stands.

A row never waits for another one. Prompts are no part of it, so nothing here can change them.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from mmaccel.contracts import Layout, Prompt
from mmaccel.errors import OptionError

_SLOTS = ("tokens", "is_committed", "is_given")
PER_ROW = (*_SLOTS, "limit", "start", "base", "end", "begun", "held", "_offset")


class Canvas:
    """Slots of B rows.

    Args:
        prompt: gives rows, stop tokens and layout; tokens the layout forces are committed from the
            start.
        length: L, slots of every row.
        mask_token: what an open slot holds.
        block: slots per block; None takes the canvas as one.
        offset: `[B]` int64, slots by which a row's first block is shorter.

    Attributes:
        tokens: `[B, L]` int64, the mask token where nothing is committed.
        is_committed: `[B, L]` bool.
        is_given: `[B, L]` bool, committed from the start; nothing may change these.
        limit: `[B]` int64, slots that count: up to the first stop token, once there is one.
        start, end: `[B]` int64, the active block, the first one with an open slot; both are
            `limit` where no slot is open. A stop token does not shorten it, lest passes see less.
        base: `[B]` int64, where the active block begins, prompt tokens in it counted: `start`, or
            below 0.
        begun: `[B]` int64, slots the row has committed since its active block began.
        held: `[B]` bool, rows that stay at their active block though it is full.
        follows: whether a block begins where the one before it ended, and not on a grid.
        drops: whether passes leave out what is behind `limit`.
    """

    def __init__(
        self,
        prompt: Prompt,
        length: int,
        mask_token: int | None,
        block: int | None,
        offset: Tensor,
    ) -> None:
        batch, device = prompt.batch, prompt.tokens.device
        self.length, self.mask_token = length, mask_token
        self._blank = 0 if mask_token is None else mask_token
        self.tokens = torch.full((batch, length), self._blank, device=device)
        self.is_committed = torch.zeros(batch, length, dtype=torch.bool, device=device)
        self.limit = torch.full((batch,), length, device=device)
        self.stop_tokens = prompt.stop_tokens
        self.slots = torch.arange(length, device=device)
        self._block, self._offset = block, offset
        self._give(prompt.layout, batch)
        self.is_given = self.is_committed.clone()
        self.start = torch.full_like(self.limit, -1)
        self.base, self.end = self.start.clone(), self.start.clone()
        self.begun = torch.zeros_like(self.limit)
        self.held = torch.zeros_like(self.limit, dtype=torch.bool)
        self.follows = self.drops = False
        self.settle()

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
        return self.is_open.any(1) | self.held

    def commit(self, chosen: Tensor, tokens: Tensor) -> Tensor:
        """Put tokens into chosen open slots.

        Args:
            chosen: `[B, L]` bool; slots that are not open are left out.
            tokens: `[B, L]` int64, read where chosen.

        Returns:
            `[B]` int64, slots committed.
        """
        chosen = chosen & self.is_open
        self.tokens = torch.where(chosen, tokens, self.tokens)
        self.is_committed = self.is_committed | chosen
        n_new = chosen.sum(1)
        self.begun = self.begun + n_new
        return n_new

    def spread(self, slots: Tensor, values: Tensor, rest: int | bool) -> Tensor:
        """Values `[B, Q]` of slots to `[B, L]`, `rest` elsewhere; slots from L on are nowhere."""
        wide = values.new_full((values.shape[0], self.length + 1), rest)
        return wide.scatter_(1, slots.clamp(max=self.length), values)[:, : self.length]

    def reopen(self, chosen: Tensor) -> None:
        """Take committed slots `[B, L]` bool back; given ones stay."""
        chosen = chosen & self.is_committed & ~self.is_given
        self.tokens = torch.where(chosen, self._blank, self.tokens)
        self.is_committed = self.is_committed & ~chosen

    def replace(self, chosen: Tensor, tokens: Tensor) -> None:
        """Put other tokens into committed slots `[B, L]` bool; given ones stay."""
        chosen = chosen & self.is_committed & ~self.is_given
        self.tokens = torch.where(chosen, tokens, self.tokens)

    def cut(self, limit: Tensor) -> None:
        """Let rows end at `limit` `[B]` int64 where that is less."""
        self.limit = torch.minimum(self.limit, limit)

    def stop(self) -> None:
        """Let rows end behind their first committed stop token."""
        if self.stop_tokens is not None:
            stops = (self.tokens[..., None] == self.stop_tokens).any(-1) & self.is_committed
            self.cut(torch.where(stops, self.slots + 1, self.length).amin(1))

    def settle(self) -> Tensor:
        """Look for stop tokens, and move on from blocks that are full.

        Returns:
            `[B]` bool, rows whose active block is another one than before.
        """
        self.stop()
        is_open = self.is_open
        first = torch.where(is_open, self.slots, self.limit[:, None]).amin(1)  # [B]
        base, end = torch.zeros_like(first), torch.full_like(first, self.length)
        if self._block is not None:
            base = (first + self._offset) // self._block * self._block - self._offset
            end = (base + self._block).clamp(max=self.length)
        if self.follows:
            inside = first < self.end
            base = torch.where(inside, self.base, first)
            end = first + (self.length if self._block is None else self._block)
            end = torch.where(inside, self.end, end).clamp(max=self.length)
        self.held = self.held & (self.start < self.limit)
        base, end = (torch.where(is_open.any(1), x, self.limit) for x in (base, end))
        base, end = torch.where(self.held, self.base, base), torch.where(self.held, self.end, end)
        moved = base != self.base
        self.base, self.start = base, base.clamp(min=0)
        self.end = torch.maximum(end, self.start)
        self.begun = torch.where(moved, 0, self.begun)
        return moved

    def copies(self, n: int) -> Canvas:
        """n times these rows, one after the other, `[n * B]`; what is done to them is not done to
        these.
        """
        new = copy(self)
        for name in PER_ROW:
            value = getattr(self, name)
            setattr(new, name, value.repeat(n, *(1,) * (value.ndim - 1)))
        return new

    def take(self, others: Canvas, index: Tensor) -> None:
        """Become one of several copies.

        Args:
            others: `[n * B]` rows, from `copies`.
            index: `[B]` int64 in 0..n-1.
        """
        batch = index.shape[0]
        rows = index * batch + torch.arange(batch, device=index.device)
        for name in PER_ROW:
            setattr(self, name, getattr(others, name)[rows])

    def shorten(self, end: Tensor) -> None:
        """Let active blocks end at `end` `[B]` int64 where that is less; for `follows`."""
        self.end = torch.maximum(torch.minimum(self.end, end), self.start)

    def active(self) -> Tensor:
        """`[B, L]` bool, open slots of the active block."""
        inside = (self.slots >= self.start[:, None]) & (self.slots < self.end[:, None])
        return self.is_open & inside

    def _give(self, layout: Layout | None, batch: int) -> None:
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
