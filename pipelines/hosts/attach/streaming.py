"""Token streamer: passes a run's tokens to stopping criteria and a streamer, one step at a time.

A step waits until all unfinished rows have its token; then every criterion is called once with
transformers' own arguments and order. Rows that are further ahead are cut back to their end.

Source: the loop of `transformers.generation.utils.GenerationMixin._sample`, 5.17 to 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmaccel.results import Progress

_OPEN = 2**62


class TokenStreamer:
    """An `on_step` for one `generate` call.

    Args:
        prompt: `[B, T]` int64, the prompt as transformers has it, padding included.
        pad: pads a finished row; None lets finished rows go on until all are, as transformers does
            where no criterion has an end-of-sequence token.
        scores: gives scores `[B, V]` of the first n steps for criteria, those of ended rows not
            yet; None where the call records none.
    """

    def __init__(
        self,
        prompt: Tensor,
        criteria: Any,
        streamer: Any,
        pad: Tensor | None,
        scores: Callable[[int], tuple[Tensor, ...]] | None = None,
    ) -> None:
        self._scores = scores
        self._ids = prompt
        self._criteria = criteria
        self._streamer = streamer
        self._pad = pad
        self._ends = [_OPEN] * prompt.shape[0]
        self.steps = 0

    def __call__(self, progress: Progress) -> Tensor | None:
        """Pass on all complete steps; `[B]` int64, where rows end. Synchronises with the host."""
        lengths: list[int] = progress.lengths.tolist()
        while _OPEN in self._ends:
            # without padding rows that have ended go on until all have
            goes_on = [end == _OPEN or self._pad is None for end in self._ends]
            if self.steps >= min(n for n, is_open in zip(lengths, goes_on) if is_open):
                break
            self._pass_on(progress.tokens[:, self.steps])
        if self._pad is not None:
            return progress.lengths.new_tensor(self._ends)
        if _OPEN in self._ends:
            return None
        return torch.full_like(progress.lengths, self.steps)

    def _pass_on(self, tokens: Tensor) -> None:
        tokens = tokens.to(self._ids.device)
        if self._pad is not None:
            is_done = tokens.new_tensor(self._ends) != _OPEN
            tokens = torch.where(is_done, self._pad.to(tokens.device), tokens)
        self._ids = torch.cat([self._ids, tokens[:, None]], 1)
        self.steps += 1
        scores = None if self._scores is None else self._scores(self.steps)
        is_done = self._criteria(self._ids, scores)
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())
        for row, stops in enumerate(is_done.tolist()):
            if stops and self._ends[row] == _OPEN:
                self._ends[row] = self.steps
