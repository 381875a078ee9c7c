"""Passes over canvases: which columns go through the model, and what comes back of them.

The plan says what is computed and read (`mmaccel.samplers.cache_plan`), this file keeps what the
plan needs to know of each row: what was written last, and when.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass, Denoiser
from mmaccel.contracts import Prompt
from mmaccel.samplers.cache_plan import CachePlan
from mmaccel.samplers.canvas import Canvas
from mmaccel.samplers.canvas_columns import Columns, Sets
from mmaccel.samplers.canvas_live import forward_live
from mmaccel.samplers.evidence import Evidence, read_logits
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise


class CanvasLook:
    """Passes of one run.

    Args:
        model, prompt, filters, noise, cache, copies, layout: as in `CanvasRun`.
        canvas: before its first pass.
        width: Q.

    Attributes:
        by_entry: whether passes are over chosen columns.
        live: `[n]` int64, rows that the next pass is for; None: all.
        seconds: spent in the model.
    """

    def __init__(
        self,
        model: Denoiser,
        prompt: Prompt,
        canvas: Canvas,
        width: int,
        filters: Filters,
        noise: Noise,
        cache: CachePlan,
        copies: int,
        layout: str,
    ) -> None:
        self.model, self.filters, self.cache = model, filters, cache
        self._layout, self.seconds = prompt.layout, 0.0
        self.live: Tensor | None = None
        self._index = torch.arange(width, device=canvas.tokens.device)
        self._noise = {1: noise}
        n = prompt.tokens.shape[1] + canvas.length
        self.by_entry = cache.keeps or layout == "entries"
        widest = {"prefix": canvas.length, "vicinity": width + 2 * cache.margin, "none": n}
        widest["block"] = model.block or width  # the prompt's part of the first block included
        scratch = min(n, widest.get(cache.kind, width)) if cache.keeps else n
        block = model.block if model.has_store else None
        room = (copies, scratch + self.spare(width)) if self.by_entry else ()
        self._shape = (canvas.length, block, *room)
        self.columns = Columns(prompt, *self._shape)
        n_rows = len(prompt.tokens) * (1 if self.by_entry else copies)
        model.reserve(n_rows, self.columns.places if self.by_entry else n)
        self._kept = self.columns.pad.clone()  # [R], first column that is not written for good
        self._refreshed = torch.zeros_like(canvas.begun)
        self._moved = torch.ones_like(canvas.begun, dtype=torch.bool)

    def spare(self, width: int) -> int:
        """Places before the last that are kept for entries that are no columns."""
        return 0

    def restart(self, places: Tensor, prompt: Prompt) -> None:
        """Begin anew in some places, `[n]` int64; the prompt is that of all places."""
        self.columns, batch = Columns(prompt, *self._shape), prompt.batch
        rows = torch.cat([places + branch * batch for branch in range(prompt.branches)])
        self._kept = self._kept.index_copy(0, rows, self.columns.pad[rows])
        self._moved = self._moved.index_fill(0, places, True)
        self._noise = {1: self._noise[1]}  # whose own rows were refilled

    def note(self, moved: Tensor) -> None:
        """Rows `[B]` bool whose active block is new."""
        self._moved = self._moved | moved
        self._refreshed = torch.where(moved, 0, self._refreshed)

    def is_due(self, canvas: Canvas) -> bool:
        """Whether the next pass writes. Cost: one host synchronisation where a cache is kept."""
        return self.cache.keeps and bool((self._moved | self._full(canvas)).any())

    def slots(self, canvas: Canvas) -> Tensor:
        """`[K * B, Q]` int64, Q slots from the active block's first on; L and more are none."""
        return canvas.start[:, None] + self._index

    def room_ahead(self, canvas: Canvas, most: int) -> Tensor:
        """`[B]` int64, up to `most`: commits before a row's next full pass."""
        room = torch.full_like(canvas.begun, most)
        if self.cache.refresh is None or not self.cache.keeps:
            return room
        left = self.cache.refresh - 1 - (canvas.begun - self._refreshed)
        return torch.minimum(room, left.clamp(min=0))

    def look(self, canvas: Canvas, copies: int) -> tuple[Evidence, Tensor]:
        """One pass.

        Args:
            canvas: `[K * B]` rows; with K above 1 only where nothing is due.
            copies: K.

        Returns:
            Evidence `[K * B, Q]`, and `[]` int64: entries computed.
        """
        slots, is_open = self.open_slots(canvas)
        fed = self._fed(canvas).unflatten(0, (copies, -1))  # [K, B, L]
        own = slots[: fed.shape[1]]  # the active block is the same in all copies
        began = time.perf_counter()
        entries, n_entries = self._plan(canvas, fed, own)
        if self.by_entry:
            logits = self.columns.in_rows(self.model.forward(entries), copies)
        else:
            logits = forward_live(self.model, entries, self.live, fed.shape[1])
        self.seconds += time.perf_counter() - began
        return self._read(logits, canvas, slots, is_open, copies), n_entries

    def open_slots(self, canvas: Canvas) -> tuple[Tensor, Tensor]:
        """Slots `[K * B, Q]` int64 that a pass tells of, all below L, and which may be filled."""
        slots = self.slots(canvas)
        inside = slots < canvas.length
        slots = slots.clamp(max=canvas.length - 1)
        return slots, canvas.active().gather(1, slots) & inside

    def _read(
        self, logits: Tensor, canvas: Canvas, slots: Tensor, is_open: Tensor, copies: int
    ) -> Evidence:
        return read_logits(
            logits,
            self.columns.branches,
            slots,
            is_open,
            mask_token=-1 if canvas.mask_token is None else canvas.mask_token,
            filters=self.filters,
            noise=self._noise_of(copies),
            layout=self._layout,
        )

    def _plan(self, canvas: Canvas, fed: Tensor, slots: Tensor) -> tuple[CanvasPass, Tensor]:
        columns, batch = self.columns, fed.shape[1]
        end = columns.rows(canvas.end[:batch]) + columns.first  # [R]
        sight = self.cache.sight(canvas.end[:batch], canvas.length)
        if canvas.drops:
            sight = torch.minimum(sight, canvas.limit[:batch])
        seen = columns.is_real & (
            columns.index < (columns.rows(sight) + columns.first)[:, None]
        )  # [R, N]
        if not self.by_entry:
            is_real = columns.is_real.unflatten(0, (columns.branches, -1))
            is_real = is_real if self.live is None else is_real[:, self.live]
            return columns.whole(fed, seen, slots), is_real.sum() * fed.shape[0]
        base = columns.rows(canvas.base[:batch]) + columns.first
        if self.cache.kind == "block":
            computed = seen & (columns.index >= self._kept[:, None])
            written = computed & (columns.index < base[:, None])
            self._kept = base
        elif not self.cache.keeps:
            computed, written = seen, torch.zeros_like(seen)
        else:
            full = self._full(canvas)[:batch]
            start = columns.rows(canvas.start[:batch]) + columns.first
            window = self.cache.computed(columns.index, start, end)
            whole = columns.rows(full)[:, None]
            computed, written = seen & (window | whole), seen & whole
            self._refreshed = torch.where(full, canvas.begun[:batch], self._refreshed)
        self._moved = torch.zeros_like(self._moved)
        sets = Sets(computed, written, seen)
        return columns.chosen(fed, sets, slots), computed.sum() * fed.shape[0]

    def _full(self, canvas: Canvas) -> Tensor:
        batch = self._moved.shape[0]
        return self.cache.is_due(canvas.begun[:batch], self._moved, self._refreshed)

    def _fed(self, canvas: Canvas) -> Tensor:
        """What the model is shown, `[K * B, L]`: random tokens in the open slots of a model of
        uniform corruption, a function of the seed, the slot and how many are committed.
        """
        if canvas.mask_token is not None:
            return canvas.tokens
        done = canvas.is_committed.sum(1, keepdim=True)
        batch = self._moved.shape[0]
        drawn = self._noise_of(canvas.tokens.shape[0] // batch).fresh(
            canvas.slots + done * canvas.length, 0
        )
        random = (drawn.coins * self.model.vocab_size).long().clamp(max=self.model.vocab_size - 1)
        return torch.where(canvas.is_committed, canvas.tokens, random)

    def _noise_of(self, copies: int) -> Noise:
        if copies not in self._noise:
            one = self._noise[1]
            self._noise[copies] = Noise(one.seeds.repeat(copies), one.items.repeat(copies))
        return self._noise[copies]
