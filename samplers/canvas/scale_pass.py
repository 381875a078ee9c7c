"""Passes over one scale of a next-scale model, whose entries stay in its cache.

Rows at the same scale are computed together. Where rows joined a run at different times, a pass
over the canvas is one forward pass for each scale that some row is at.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.contracts import Prompt
from mmaccel.model_parts import ScalePasses
from mmaccel.samplers.canvas.model_pass import ModelPass
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.state import Canvas


class ScalePass(ModelPass):
    """Passes of a run over a model with `ScalePasses`.

    Attributes:
        filler: a `mmaccel.samplers.canvas.fast_var.ScaleFiller`; None computes every entry.
    """

    filler: Any = None

    def __init__(self, model: Any, prompt: Prompt, canvas: Canvas, *options: Any) -> None:
        super().__init__(model, prompt, canvas, *options)
        lengths: tuple[int, ...] = model.lengths
        assert isinstance(model, ScalePasses)
        self.scales = model
        self._lengths = lengths
        self._bases = [sum(lengths[:scale]) for scale in range(len(lengths))]
        self._n_done = [0] * prompt.batch  # scales of each row that the model has computed
        model.begin(prompt)

    def restart(self, batch_slots: Tensor, prompt: Prompt) -> None:
        super().restart(batch_slots, prompt)
        self.scales.restart(batch_slots, prompt)
        for row in batch_slots.tolist():
            self._n_done[row] = 0

    def forward(self, canvas: Canvas, copies: int) -> tuple[SlotPredictions, Tensor]:
        """Cost: a host synchronisation, which finds the scale of each row."""
        live = canvas.is_live.tolist()
        starts = enumerate(canvas.start.tolist())
        scale_of = {row: self._bases.index(start) for row, start in starts if live[row]}
        scales = sorted(set(scale_of.values()))
        width = self._lengths[scales[-1]]
        self._index = torch.arange(width, device=canvas.tokens.device)
        slots, is_open = self.open_slots(canvas)
        began = time.perf_counter()
        n_entries = 0
        logits: Tensor | None = None
        with self.formats.passing():
            for scale in range(scales[-1]):  # those that a layout gave whole
                skipped = [row for row, own in scale_of.items() if self._n_done[row] <= scale < own]
                if skipped:
                    some, n_computed = self._forward(canvas, scale, slots.new_tensor(skipped))
                    n_entries += n_computed * len(some)
            for row, own in scale_of.items():
                self._n_done[row] = own + 1
            for scale in scales:
                rows = None
                if len(scales) > 1 or not all(live):
                    at = canvas.is_live & (canvas.start == self._bases[scale])
                    rows = at.nonzero()[:, 0]
                some, n_computed = self._forward(canvas, scale, rows)
                n_entries += n_computed * len(some)
                some = pad(some, (0, 0, 0, width - some.shape[1]))
                if rows is None:
                    logits = some
                    continue
                if logits is None:
                    n_rows = len(live) * self.columns.branches
                    logits = some.new_zeros(n_rows, *some.shape[1:])
                branches = torch.arange(self.columns.branches, device=rows.device)[:, None]
                logits[(rows + branches * len(live)).flatten()] = some
        self.seconds += time.perf_counter() - began
        assert logits is not None
        predictions = self.predict(logits, canvas, slots, is_open, copies)
        return predictions, slots.new_tensor(n_entries)

    def _forward(self, canvas: Canvas, scale: int, rows: Tensor | None) -> tuple[Tensor, int]:
        before = None
        if scale:
            part = canvas.tokens[:, self._bases[scale - 1] : self._bases[scale]]
            before = part if rows is None else part[rows]
        around = None if self.filler is None else self.filler.around(scale, rows)
        logits, n_entries = self.scales.forward_scale(scale, before, rows, around)
        n_filled = 0 if self.filler is None else self.filler.n_computed
        return logits, n_filled or n_entries
