"""Passes over canvases: which columns go through the model, and what comes back of them.

The plan says what is computed and read (`mmaccel.samplers.canvas.cache_plan`), this file keeps what the
plan needs to know of each row: what was written last, and when.

Live rows: a pass over whole canvases leaves out rows that have nothing open.

For models that keep nothing between passes, whose rows are those of one pass and no other.

Looks that also tell how likely every committed token would be if it stood open: shadow entries.

F. Hong et al., "Wide-In, Narrow-Out: Revokable Decoding for Efficient and Effective DLLMs" (WINO),
ICLR 2026, arXiv 2507.18578, section 4.2.

A shadow is a further mask token at a committed slot's position. It looks at what the slot's entry
looks at and at itself, but not at that entry; nobody looks at shadows. In a model of several layers
the others' states have seen the token, so that it is left out up to that.

Departures: shadows stand at places of their own in the store, so that they go with a cache; several
blocks and rows at once.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass, Denoiser
from mmaccel.contracts import Prompt
from mmaccel.samplers.canvas.cache_plan import CachePlan
from mmaccel.samplers.canvas.layout import Columns, Sets
from mmaccel.samplers.canvas.predictions import SlotPredictions, read_logits
from mmaccel.samplers.canvas.state import Canvas
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams


def live_rows(model: Denoiser, is_live: list[bool], device: torch.device) -> Tensor | None:
    """Indices `[n]` int64 of rows that take part; None where all do, or none."""
    if not takes_any_rows(model) or all(is_live) or not any(is_live):
        return None
    return torch.tensor([row for row, is_one in enumerate(is_live) if is_one], device=device)


def takes_any_rows(model: Denoiser) -> bool:
    """Whether nothing in a model belongs to a row of the prompt."""
    return bool(getattr(model, "any_rows", False))


def forward_live(model: Denoiser, entries: CanvasPass, live: Tensor | None, batch: int) -> Tensor:
    """Run a pass over some rows.

    Args:
        model: keeps nothing.
        entries: of m * B rows, row b of each copy and branch at b, B + b, ...
        live: `[n]` int64 in 0..B-1; None: all.
        batch: B.

    Returns:
        Logits `[m * B, Q, V]`; 0 in rows that were left out, where they mean nothing.
    """
    if live is None:
        return model.forward(entries)
    total = entries.tokens.shape[0]
    first = torch.arange(0, total, batch, device=live.device)
    rows = (first[:, None] + live).flatten()
    some = model.forward(CanvasPass(**{name: value[rows] for name, value in vars(entries).items()}))
    return some.new_zeros(total, *some.shape[1:]).index_copy(0, rows, some)


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
        params: SamplingParams,
        noise: Noise,
        cache: CachePlan,
        copies: int,
        layout: str,
    ) -> None:
        self.model, self.params, self.cache = model, params, cache
        self._layout, self.seconds = prompt.layout, 0.0
        self.live: Tensor | None = None
        self._index = torch.arange(width, device=canvas.tokens.device)
        self._noise = {1: noise}
        n = prompt.tokens.shape[1] + canvas.length
        self.by_entry = cache.keeps or layout == "entries"
        widest = {"prefix": canvas.length, "vicinity": width + 2 * cache.margin, "none": n}
        widest["block"] = model.block or width  # the prompt's part of the first block included
        scratch = min(n, widest.get(cache.kind, width)) if cache.keeps else n
        block = model.block if model.supports_kv_cache else None
        room = (copies, scratch + self.spare(width)) if self.by_entry else ()
        self._shape = (canvas.length, block, *room)
        self.columns = Columns(prompt, *self._shape)
        n_rows = len(prompt.tokens) * (1 if self.by_entry else copies)
        model.reserve(n_rows, self.columns.cache_size if self.by_entry else n)
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

    def look(self, canvas: Canvas, copies: int) -> tuple[SlotPredictions, Tensor]:
        """One pass.

        Args:
            canvas: `[K * B]` rows; with K above 1 only where nothing is due.
            copies: K.

        Returns:
            SlotPredictions `[K * B, Q]`, and `[]` int64: entries computed.
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
    ) -> SlotPredictions:
        return read_logits(
            logits,
            self.columns.branches,
            slots,
            is_open,
            mask_token=-1 if canvas.mask_token is None else canvas.mask_token,
            params=self.params,
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


class ShadowLook(CanvasLook):
    """`CanvasLook` with shadows; the same arguments.

    Attributes:
        left_out: `[B, Q]` float32, model's probability of the token a slot holds, without it; 1
            where nothing is to be checked.
    """

    left_out: Tensor

    def spare(self, width: int) -> int:
        """One for every slot of a block."""
        return width

    def look(self, canvas: Canvas, copies: int) -> tuple[SlotPredictions, Tensor]:
        """One pass over one canvas; see `CanvasLook.look`."""
        slots, is_open = self.open_slots(canvas)
        checked = canvas.is_committed & ~canvas.is_given
        end = torch.minimum(canvas.end, canvas.limit)[:, None]
        checked = checked.gather(1, slots) & (self.slots(canvas) < end)
        began = time.perf_counter()
        entries, n_entries = self._plan(canvas, self._fed(canvas)[None], slots)
        assert canvas.mask_token is not None
        entries = with_shadows(entries, self.columns, checked, canvas.mask_token)
        own, shadows = self.model.forward(entries).chunk(2, 1)
        self.seconds += time.perf_counter() - began
        seen = self._read(own, canvas, slots, is_open, copies)
        aside = self._read(shadows, canvas, slots, checked, copies)
        last = aside.law.shape[-1] - 1  # the mask may be no id of the law; it is not checked
        tokens = canvas.tokens.gather(1, slots).clamp(max=last)[..., None]
        chance = aside.law.softmax(-1).gather(-1, tokens)[..., 0]
        self.left_out = torch.where(checked, chance, 1.0)
        return seen, n_entries + checked.sum() * self.columns.branches


def with_shadows(
    entries: CanvasPass, columns: Columns, checked: Tensor, mask_token: int
) -> CanvasPass:
    """A pass with a shadow for every query.

    Args:
        entries: over chosen columns, of one canvas.
        columns: with Q spare places in front of the last.
        checked: `[B, Q]` bool, queries whose shadow is wanted; the others' are nobody's.
        mask_token: what a shadow holds.

    Returns:
        C + Q entries and 2 Q queries, the shadows behind.
    """
    rows, count = entries.tokens.shape
    queries, n = entries.queries, entries.queries.shape[1]  # [R, Q]
    index = torch.arange(n, device=queries.device)
    own = entries.cache_indices.gather(1, queries)[..., None]  # [R, Q, 1]
    last = columns.cache_size - 1
    places = torch.where(checked.repeat(columns.branches, 1), last - n + index, last)
    reads = entries.reads.expand(-1, count, -1)
    theirs = reads.gather(1, queries[..., None].expand(-1, -1, columns.cache_size))  # [R, Q, P]
    theirs = theirs.scatter(2, own, False).scatter(2, places[..., None], True)
    theirs[..., -1] = False
    return CanvasPass(
        torch.cat([entries.tokens, torch.full_like(queries, mask_token)], 1),
        torch.cat([entries.positions, entries.positions.gather(1, queries)], 1),
        torch.cat([entries.cache_indices, places], 1),
        torch.cat([reads, theirs], 1),
        torch.cat([queries, (count + index).expand(rows, -1)], 1),
    )
