"""Token streamer: passes a run's tokens to stopping criteria and a streamer, one step at a time.

transformers calls its criteria after every single token of the whole batch. A window run generates
several tokens a pass, and each row at its own pace. So a step waits until all unfinished rows have
its token; then every criterion is called once with transformers' own arguments and order, so that
criteria that count or remember stay correct. Rows that are further ahead are cut back to their end.

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
        criteria: transformers' stopping criteria.
        streamer: transformers' streamer or None.
        pad: pads a finished row; None lets finished rows go on until all are finished, as
            transformers does where no criterion has an end-of-sequence token.
        scores: gives the scores `[B, V]` of the first n steps, which criteria may read; None where
            the call records none. Those of rows that have ended are not there yet.

    Attributes:
        steps: number of steps passed on so far.
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
        self._finish = [_OPEN] * prompt.shape[0]
        self.steps = 0

    def __call__(self, progress: Progress) -> Tensor | None:
        """Pass on all complete steps; returns `[B]` int64, where rows end.

        Cost: one host synchronisation.
        """
        lengths: list[int] = progress.lengths.tolist()
        while self.steps < self._count_complete(lengths):
            self._pass_on(progress.tokens[:, self.steps])
        if self._pad is None and _OPEN in self._finish:
            return None
        ends = self._finish if self._pad is not None else [self.steps] * len(self._finish)
        return progress.lengths.new_tensor(ends)

    def _count_complete(self, lengths: list[int]) -> int:
        """Steps for which every unfinished row has a token."""
        unfinished = [n for n, end in zip(lengths, self._finish) if end == _OPEN]
        if not unfinished:
            return self.steps
        return min(unfinished if self._pad is not None else lengths)

    def _pass_on(self, tokens: Tensor) -> None:
        tokens = tokens.to(self._ids.device)
        if self._pad is not None:
            done = torch.tensor(
                [end != _OPEN for end in self._finish], device=tokens.device, dtype=torch.bool
            )
            tokens = torch.where(done, self._pad.to(tokens.device), tokens)
        self._ids = torch.cat([self._ids, tokens[:, None]], 1)
        self.steps += 1
        scores = None if self._scores is None else self._scores(self.steps)
        is_done: list[bool] = self._criteria(self._ids, scores).tolist()
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())
        for row, stops in enumerate(is_done):
            if stops and self._finish[row] == _OPEN:
                self._finish[row] = self.steps
