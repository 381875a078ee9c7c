"""The last tokens before every entry of a window, gathered without a loop over positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import OptionError


class WindowRule(ABC):
    """A logits processor for transformers that is defined over windows: a position is one of 1."""

    @abstractmethod
    def over_window(self, scores: Tensor, line: Tensor, columns: Tensor) -> Tensor:
        """Scores `[B, W, V]`, line `[B, N]`, columns `[B, W]` to `[B, W, V]`: a `Processor`."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Ids `[B, T]` int64 and scores `[B, V]` to `[B, V]`."""
        ends = input_ids.new_full((len(input_ids), 1), input_ids.shape[1])
        return self.over_window(scores[:, None], input_ids, ends)[:, 0]


def recent_tokens(line: Tensor, columns: Tensor, window: int, size: int, start: int = 0) -> Tensor:
    """The last tokens of every entry's prefix.

    Args:
        line: `[B, N]` int64, the prefix of entry (b, w) is `line[b, :columns[b, w]]`.
        columns: `[B, W]` int64 in 0..N.
        window: how many tokens to look back.
        size: V; stands in the answer for what is no token of the vocabulary (padding, ids the head
            cannot make) and for columns before the prefix.
        start: >= 0; columns before this one do not count.

    Returns:
        `[B, W, K]` int64 in 0..V with K = min(window, N).

    Cost: memory for B * W * K ids.
    """
    reach = min(window, line.shape[1])
    back = torch.arange(-reach, 0, device=line.device)
    index = columns[..., None] + back  # [B, W, K]
    tokens = line.gather(1, index.clamp(min=0).flatten(1)).view_as(index)
    counts = (index >= start) & (tokens >= 0) & (tokens < size)
    return tokens.where(counts, size)


def check_window(window: Any) -> None:
    """Raise OptionError unless the window is an integer >= 1."""
    if not isinstance(window, Integral) or isinstance(window, bool) or window < 1:
        raise OptionError(
            f"window: expected an integer >= 1, received {window!r}; it counts the tokens looked "
            "back at"
        )
