"""Forward passes over canvases: `ModelPass` keeps what a cache plan needs to know of each row."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass, Denoiser, Prompt
from mmaccel.model_parts import FinishedBlocks
from mmaccel.samplers.arithmetic import PassFormats, as_called
from mmaccel.samplers.canvas.cache_plan import CachePlan
from mmaccel.samplers.canvas.layout import Columns, ColumnSets
from mmaccel.samplers.canvas.predictions import SlotPredictions, read_logits
from mmaccel.samplers.canvas.state import Canvas
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams


class ModelPass:
    """Passes of one run, made with what `CanvasRun` has; `width` is Q."""

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
        self._layout = prompt.layout
        self.seconds = 0.0  # spent in the model
        self.formats = PassFormats(model)
        self.live: Tensor | None = None  # [n] int64, rows that the next pass computes; None: all
        self._index = torch.arange(width, device=canvas.tokens.device)
        self._noise = {1: noise}
        n = prompt.tokens.shape[1] + canvas.length
        self.by_entry = cache.reuses or layout == "entries"
        widest = {"prefix": canvas.length, "vicinity": width + 2 * cache.margin, "none": n}
        widest["block"] = model.block or width  # the prompt's part of the first block included
        scratch = min(n, widest.get(cache.kind, width)) if cache.reuses else n
        block = model.block if model.supports_kv_cache else None
        extra = (copies, scratch + self.extra_cache_indices(width)) if self.by_entry else ()
        self._shape = (canvas.length, block, model.shift, *extra)
        self.columns = Columns(prompt, *self._shape)
        n_rows = len(prompt.tokens) * (1 if self.by_entry else copies)
        model.reserve(n_rows, self.columns.cache_size if self.by_entry else n)
        self._first_unwritten = self.columns.pad.clone()  # [R], columns below are cached for good
        self._refreshed_at = torch.zeros_like(canvas.block_commits)
        self._is_new_block = torch.ones_like(canvas.block_commits, dtype=torch.bool)
        # entries of prompts that a pass of their own has processed
        self.n_prefilled = self._prefill(canvas) if cache.kind == "block" else 0

    def _prefill(self, canvas: Canvas) -> int:
        """Process the finished blocks of prompts that are longer than the model keeps."""
        columns = self.columns
        model = self.model
        if not isinstance(model, FinishedBlocks):
            return 0
        limit = model.prompt_limit
        base = columns.to_pass_rows(canvas.base.clamp(max=0)) + columns.first  # [R]
        lengths = base - columns.pad
        if limit is None or int(lengths.max()) <= limit:
            return 0
        computed = columns.is_real & (columns.index < base[:, None])
        sets = ColumnSets(computed, written=computed, visible=computed)
        began = time.perf_counter()
        entries = columns.as_entries(self.model_tokens(canvas)[None], sets, canvas.start[:, None])
        with as_called():
            model.prefill(replace(entries, start=columns.pad, lengths=lengths))
        self.seconds += time.perf_counter() - began
        self._first_unwritten = base
        return int(lengths.sum())

    def extra_cache_indices(self, width: int) -> int:
        """Cache indices before the last one for entries that are no columns."""
        return 0

    @property
    def n_rows(self) -> int:
        """Rows of a pass over one canvas of each row asked for, guidance branches included."""
        batch = self._is_new_block.shape[0] if self.live is None else len(self.live)
        return batch * self.columns.branches

    def restart(self, batch_slots: Tensor, prompt: Prompt) -> None:
        """Forget the rows of `batch_slots`, `[n]` int64; `prompt` is that of all batch slots."""
        self.columns = Columns(prompt, *self._shape)
        batch = prompt.batch
        rows = torch.cat([batch_slots + branch * batch for branch in range(prompt.branches)])
        self._first_unwritten = self._first_unwritten.index_copy(0, rows, self.columns.pad[rows])
        self._is_new_block = self._is_new_block.index_fill(0, batch_slots, True)
        self._noise = {1: self._noise[1]}  # the noise of the rows was refilled in place

    def choose_live_rows(self, is_live: list[bool]) -> None:
        self.live = None
        if not self.by_entry and self.model.any_rows and not all(is_live) and any(is_live):
            rows = [row for row, is_one in enumerate(is_live) if is_one]
            self.live = self._index.new_tensor(rows)

    def begin_blocks(self, is_new: Tensor) -> None:
        self._is_new_block = self._is_new_block | is_new
        self._refreshed_at = torch.where(is_new, 0, self._refreshed_at)

    def is_refresh_due(self, canvas: Canvas) -> bool:
        """Whether the next pass writes. Cost: one host synchronisation where a cache is used."""
        return self.cache.reuses and bool((self._is_new_block | self._needs_refresh(canvas)).any())

    def commits_before_refresh(self, canvas: Canvas, most: int) -> Tensor:
        """`[B]` int64, up to `most`: commits before a row's next refresh."""
        result = torch.full_like(canvas.block_commits, most)
        if self.cache.refresh is None or not self.cache.reuses:
            return result
        rest = self.cache.refresh - 1 - (canvas.block_commits - self._refreshed_at)
        return torch.minimum(result, rest.clamp(min=0))

    def slots(self, canvas: Canvas) -> Tensor:
        """`[K * B, Q]` int64, Q slots from the active block's first on; L and above are none."""
        return canvas.start[:, None] + self._index

    def open_slots(self, canvas: Canvas) -> tuple[Tensor, Tensor]:
        """Slots `[K * B, Q]` int64 that a pass predicts, all below L, and which are open."""
        slots = self.slots(canvas)
        inside = slots < canvas.length
        slots = slots.clamp(max=canvas.length - 1)
        return slots, canvas.active().gather(1, slots) & inside

    def forward(self, canvas: Canvas, copies: int) -> tuple[SlotPredictions, Tensor]:
        """Run one pass over K copies of a canvas, `[K * B]` rows; K above 1 only where no refresh
        is due. Returns predictions `[K * B, Q]`, and the number of entries computed, `[]` int64.
        """
        slots, is_open = self.open_slots(canvas)
        tokens = self.model_tokens(canvas).unflatten(0, (copies, -1))  # [K, B, L]
        asked = slots[: tokens.shape[1]]  # the active block is the same in all copies
        began = time.perf_counter()
        entries, n_entries = self.plan(canvas, tokens, asked)
        with self.formats.passing():
            if self.by_entry:
                logits = self.columns.logits_as_rows(self.model.forward(entries), copies)
            elif self.live is None:
                logits = self.model.forward(entries)
            else:  # row b of each copy and branch is at b, B + b, ...; 0 in rows that are left out
                total = len(entries.tokens)
                first = torch.arange(0, total, tokens.shape[1], device=asked.device)
                rows = (first[:, None] + self.live).flatten()
                some = self.model.forward(entries.select(rows))
                logits = some.new_zeros(total, *some.shape[1:]).index_copy(0, rows, some)
        self.seconds += time.perf_counter() - began
        return self.predict(logits, canvas, slots, is_open, copies), n_entries

    def model_tokens(self, canvas: Canvas) -> Tensor:
        """The canvas that the model receives, `[K * B, L]`: with uniform corruption open slots hold
        random tokens, by the seed, the slot and how many slots are committed.
        """
        if canvas.mask_token is not None:
            return canvas.tokens
        done = canvas.is_committed.sum(1, keepdim=True)
        batch = self._is_new_block.shape[0]
        drawn = self._noise_of(canvas.tokens.shape[0] // batch).fresh(
            canvas.slots + done * canvas.length, 0
        )
        random = (drawn.coins * self.model.vocab_size).long().clamp(max=self.model.vocab_size - 1)
        return torch.where(canvas.is_committed, canvas.tokens, random)

    def plan(self, canvas: Canvas, tokens: Tensor, slots: Tensor) -> tuple[CanvasPass, Tensor]:
        """The pass over `tokens` `[K, B, L]` that computes `slots` `[B, Q]`, and the number of
        entries in it, `[]` int64. The cache counts as written from here on.
        """
        columns = self.columns
        batch = tokens.shape[1]
        end = columns.to_pass_rows(canvas.end[:batch]) + columns.first  # [R]
        visible_end = self.cache.visible_end(canvas.end[:batch], canvas.length)
        if canvas.drop_suffix:
            visible_end = torch.minimum(visible_end, canvas.limit[:batch])
        visible_end = columns.to_pass_rows(visible_end) + columns.first
        visible = columns.is_real & (columns.index < visible_end[:, None])  # [R, N]
        if not self.by_entry:
            is_real = columns.is_real.unflatten(0, (columns.branches, -1))
            is_real = is_real if self.live is None else is_real[:, self.live]
            return columns.as_rows(tokens, visible, slots), is_real.sum() * tokens.shape[0]
        is_live = columns.to_pass_rows(canvas.is_live[:batch])  # the others compute nothing
        ongoing = visible & is_live[:, None]
        if self.cache.kind == "block":
            base = columns.to_pass_rows(canvas.base[:batch]) + columns.first
            computed = ongoing & (columns.index >= self._first_unwritten[:, None])
            written = computed & (columns.index < base[:, None])
            self._first_unwritten = base
        elif not self.cache.reuses:
            computed = ongoing
            written = torch.zeros_like(visible)
        else:
            refreshes = self._needs_refresh(canvas)[:batch]
            start = columns.to_pass_rows(canvas.start[:batch]) + columns.first
            window = self.cache.computed(columns.index, start, end)
            everything = columns.to_pass_rows(refreshes)[:, None]  # [R, 1]
            if self.cache.kind == "sub-block":
                low, high = columns.own_block(start)
                visible = visible & (columns.index < high[:, None])
                ongoing = ongoing & visible
                unwritten = columns.index >= self._first_unwritten[:, None]
                self._first_unwritten = torch.where(everything[:, 0], low, self._first_unwritten)
                everything = everything & unwritten  # [R, N]
            computed = ongoing & (window | everything)
            written = ongoing & everything
            self._refreshed_at = torch.where(
                refreshes, canvas.block_commits[:batch], self._refreshed_at
            )
        self._is_new_block = torch.zeros_like(self._is_new_block)
        sets = ColumnSets(computed, written, visible)
        return columns.as_entries(tokens, sets, slots), computed.sum() * tokens.shape[0]

    def predict(
        self, logits: Tensor, canvas: Canvas, slots: Tensor, is_open: Tensor, copies: int
    ) -> SlotPredictions:
        """The predictions of a pass from its logits `[G * K * B, Q, V]`."""
        self.formats.note(logits)
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

    def _needs_refresh(self, canvas: Canvas) -> Tensor:
        block_commits = canvas.block_commits[: self._is_new_block.shape[0]]
        return self.cache.needs_refresh(block_commits, self._is_new_block, self._refreshed_at)

    def _noise_of(self, copies: int) -> Noise:
        if copies not in self._noise:
            one = self._noise[1]
            self._noise[copies] = Noise(one.seeds.repeat(copies), one.items.repeat(copies))
        return self._noise[copies]
