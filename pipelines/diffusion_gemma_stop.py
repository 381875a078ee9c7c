"""DiffusionGemma's own rule for ending a canvas early, within a run of a canvas policy.

Source: `StableAndConfidentStoppingCriteria`, transformers 5.23: the likeliest tokens stay for some
passes, and the mean entropy is low.

Departures: a row that ends takes the token drawn for each open slot, where the library takes the
likeliest of every slot; what that costs is counted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasProgress
from mmaccel.contracts import Layout
from mmaccel.pipelines.diffusion_gemma_canvas import GemmaDecoder
from mmaccel.samplers.evidence import read_logits
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise

Then = Callable[[int, Tensor, Tensor], None]
"""Told after every pass of a canvas: its number from 0, tokens `[B, L]`, the likeliest where
nothing stands, and scores `[B, L, V]`."""


class StopRule:
    """Ends rows whose likeliest tokens stay and are sure, by the library's own criterion.

    Such a row takes the token drawn for each slot that is open.

    Args:
        criterion: of the likeliest tokens `[B, L]` and scores `[B, L, V]`; None: never.
        decoder: whose last scores are looked at.
        filters, noise, layout: of the run.
        then: called after every pass, or None.

    Attributes:
        ended: `[B]` bool.
        tokens: `[B, L]` int64, of the rows that ended.
        nats: sum of the entropies of what these took at once.
    """

    def __init__(
        self,
        criterion: Callable[[Tensor, Tensor], Tensor] | None,
        decoder: GemmaDecoder,
        filters: Filters,
        noise: Noise,
        layout: Layout,
        then: Then | None,
    ) -> None:
        self._criterion, self._decoder, self._then = criterion, decoder, then
        self._filters, self._noise, self._layout = filters, noise, layout
        self.ended = torch.zeros_like(noise.seeds, dtype=torch.bool)
        self.tokens, self.nats = torch.empty(0), 0.0

    def __call__(self, progress: CanvasProgress) -> Tensor | None:
        """See `OnCanvasStep`."""
        scores, committed = self._decoder.scores, progress.is_committed
        likely = torch.where(committed, progress.tokens, scores.argmax(-1))
        if self._criterion is not None:
            self._end(progress, likely, scores)
            likely = torch.where(self.ended[:, None], self.tokens, likely)
        if self._then is not None:
            self._then(progress.passes - 1, likely, scores)
        if self._criterion is None:
            return None
        return torch.where(self.ended, 0, progress.tokens.shape[1])

    def _end(self, progress: CanvasProgress, likely: Tensor, scores: Tensor) -> None:
        assert self._criterion is not None
        if not self.tokens.numel():
            self.tokens = progress.tokens
        new = self._criterion(likely, scores) & ~self.ended
        is_open = ~progress.is_committed & new[:, None]
        slots = torch.arange(scores.shape[1], device=scores.device).expand_as(is_open)
        seen = read_logits(
            scores, 1, slots, is_open, mask_token=-1, filters=self._filters, noise=self._noise,
            layout=self._layout,
        )  # fmt: skip
        assert seen.drawn is not None
        taken = torch.where(is_open, seen.drawn, progress.tokens)
        self.tokens = torch.where(new[:, None], taken, self.tokens)
        self.nats += float(torch.where(is_open, seen.entropy, 0.0).sum())
        self.ended = self.ended | new
