"""StepRecorder: what a window run tells somebody who wants more of its steps than tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mmaccel.samplers.window.run import WindowRun

_WIDEST = 64  # slots of a pass over fillers


class StepRecorder(ABC):
    """Receives what passes give out, and which of their slots were accepted. Passes in which it
    `is_active` are not captured, because the host stores what they give out.
    """

    is_active: bool

    @abstractmethod
    def record(self, name: str, value: Any, skipped: int = 0) -> None:
        """Note "logits" or "scores" `[B, W, V]`, or else, of this pass from entry `skipped` on."""

    @abstractmethod
    def accept(self, first: Tensor, n_new: Tensor) -> None:
        """Keep what was noted of the `n_new` `[B]` accepted entries from slot `first` `[B]` on."""

    @abstractmethod
    def finish(self, run: WindowRun) -> None:
        """Called once, when all rows have ended and the cache still holds them."""


def process_filler(run: WindowRun, recorder: StepRecorder, filler: Tensor) -> None:
    """Let rows that have ended go on with a filler, `[]` int64, up to the end of the longest row:
    then, as after transformers' loop, the cache holds all but the last token of every row, and the
    recorder has all slots. Cost: a pass for every 64 slots after the end of the shortest row.
    """
    rows = run.rows
    lengths = rows.n_generated.clone()
    first = int(lengths.min())
    end = int(lengths.max())
    tokens = rows.generated(end)  # [B, end], a view
    is_generated = torch.arange(end, device=tokens.device) < lengths[:, None]
    tokens.copy_(torch.where(is_generated, tokens, filler.to(tokens.device)))
    for slot in range(max(first, 1), end, _WIDEST):
        width = min(_WIDEST, end - slot)
        rows.n_generated.fill_(slot)
        rows.move_window(width)
        run.forward()
        if recorder.is_active:
            recorder.accept(rows.n_generated, torch.full_like(lengths, width))
        run.stats.passes += 1
        run.stats.tokens_processed += width * len(run.rows.lengths)
    rows.n_generated.copy_(lengths)
