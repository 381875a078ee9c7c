"""TokenBuffer: prompts, tokens and drafts of a batch in one tensor, and the window over them.

The prompts are right-aligned, so that slot i of every row has the same column. A model's positions
count from the row's own first token instead; see `RunRows.next_positions`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.samplers.window.step_state import StaticPart

_FILLER = 64  # slots of a pass over fillers, which may be wider than the window
_STEP = 64  # capacities are rounded up to it, so that prompts of many lengths share graphs


class Capacity(NamedTuple):
    """Size of a run: columns before slot 0, slots, and positions of the model's cache."""

    origin: int
    slots: int
    positions: int


def measure(
    prompt: Prompt, length: int, *, rounded: bool = False, most: int | None = None
) -> Capacity:
    """The capacity that a run needs.

    Args:
        prompt: what stands before slot 0.
        length: slots wanted.
        rounded: round up, so that other prompts and lengths fit too.
        most: the model's positions, if known. Rounding never goes beyond them.
    """
    origin, needed = prompt.tokens.shape[1], prompt.tokens.shape[1] + length - 1
    if not rounded:
        return Capacity(origin, length, needed)  # the last token is never processed
    origin, slots = (-(-n // _STEP) * _STEP for n in (origin, length))
    positions = origin + slots - 1
    return Capacity(origin, slots, positions if most is None else max(needed, min(positions, most)))


class TokenBuffer(StaticPart):
    """The tokens of every row, and which W slots of each row the next pass covers.

    Args:
        prompt: what stands before slot 0.
        capacity: from `measure`.
        widest: the largest W there will be.

    Attributes:
        tokens: `[B, N]` int64, prompt (left-padded with -1), generated tokens, drafts.
        origin: column of slot 0 in `tokens`.
        n_generated: `[B]` int64, tokens generated so far.
        filled: `[B]` int64, first column that no pass has predicted.
        last_of_prompt: `[R, 1]` int64, the last prompt token of every row of every branch.
        index: `[N]` int64, the numbers from 0 on.
        slots: `[B, W]` int64, the slots that the window covers.
    """

    static = ("tokens", "n_generated", "filled", "last_of_prompt", "index")

    def __init__(self, prompt: Prompt, capacity: Capacity, widest: int) -> None:
        self.origin, self._branches = capacity.origin, prompt.branches
        self._n_free = capacity.slots + widest  # columns from slot 0 on
        self.tokens = self._align(prompt)
        self.n_generated = prompt.tokens.new_zeros(prompt.batch)
        self.filled = self.n_generated + self.origin
        self.last_of_prompt = _last_tokens(prompt)
        self.index = torch.arange(max(widest, _FILLER), device=self.tokens.device)

    def _align(self, prompt: Prompt) -> Tensor:
        """`[B, N]` int64: -1, then the conditional branch's prompt, then 0 from slot 0 on."""
        batch = prompt.batch
        shift = self.origin - prompt.lengths[:batch, None]
        index = torch.arange(self.origin, device=prompt.tokens.device)[None] - shift
        aligned = prompt.tokens[:batch].gather(1, index.clamp(min=0))
        aligned = torch.where(index >= 0, aligned, -1)
        return torch.cat([aligned, aligned.new_zeros(batch, self._n_free)], 1)

    def restart(self, batch_slots: Tensor, prompt: Prompt) -> None:
        """Begin anew in some batch slots, `[n]` int64; `prompt` is that of all B of them."""
        self.last_of_prompt.copy_(_last_tokens(prompt))
        self.tokens[batch_slots] = self._align(prompt)[batch_slots]
        self.n_generated[batch_slots] = 0
        self.filled[batch_slots] = self.origin

    def keep_rows(self, batch_slots: Tensor, prompt: Prompt) -> None:
        """Go on with some batch slots alone, `[n]` int64; `prompt` is theirs."""
        self.last_of_prompt = _last_tokens(prompt)
        self.tokens, self.filled = self.tokens[batch_slots], self.filled[batch_slots]
        self.n_generated = self.n_generated[batch_slots]

    def move_window(self, width: int) -> None:
        """Cover the next `width` slots of every row."""
        self.slots = self.n_generated[:, None] + self.index[:width]  # [B, W]

    @property
    def columns(self) -> Tensor:
        """`[B, W]` int64, the columns of the window's slots in `tokens`."""
        return self.slots + self.origin

    def is_predicted(self) -> Tensor:
        """`[B, W-1]` bool: the draft slots for which the last pass predicted a token."""
        return self.columns[:, :-1] < self.filled[:, None]

    def forget_drafts(self) -> None:
        """Treat no prediction of the last pass as a draft."""
        self.filled.copy_(self.origin + self.n_generated)

    def model_inputs(self, columns: Tensor, tokens: Tensor) -> Tensor:
        """What the rows of all branches read at some columns, `[R, K]`.

        Before slot 0 every branch gets the last token of its own prompt.

        Args:
            columns: `[B, K]` int64.
            tokens: `[B, N]` int64, the token buffer, or a copy with other drafts.
        """
        tokens = tokens.gather(1, columns)  # [B, K]
        last = self.last_of_prompt.view(self._branches, -1, 1)  # [G, B, 1]
        return torch.where(columns < self.origin, last, tokens).flatten(0, 1)

    def generated(self, length: int) -> Tensor:
        """A view of slots 0 … `length` - 1, `[B, length]` int64."""
        return self.tokens[:, self.origin : self.origin + length]


def _last_tokens(prompt: Prompt) -> Tensor:
    return prompt.tokens.gather(1, prompt.lengths[:, None] - 1)
