"""DelayWindow: a decoder of several codebooks a step under any pattern, as a stream of codes.

A *pattern* says at which step a decoder stands at each code of a frame (J. Copet et al., "Simple
and Controllable Music Generation", NeurIPS 2023 (arXiv 2306.05284), section 2.2). The cells of its
grid `[S, K]` of steps and codebooks that are generated, step by step and book by book, are the
slots of a row; the others are given. Codes of one step do not depend on each other: those redrawn
after a rejected code of a step are right already, and the draft of the next pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.contracts import Pass, PromptCost, TokenModel
from mmaccel.pipelines.hosts.causal_lm.compatibility import find_device
from mmaccel.pipelines.hosts.runner.static_buffers import reads_back


class Cells(NamedTuple):
    """L cells of a grid, in the order in which a decoder fills them."""

    step: Tensor  # [L] int64, ascending
    book: Tensor  # [L] int64, ascending within a step


class StepDecoder(ABC):
    """A decoder of steps with a cache of its own.

    Shapes: **R** rows, **n** steps of a pass, **K** codebooks, **V** codes of each.
    """

    vocab_size: int  # V
    reads_back: bool = True  # whether passes after the next `reserve` may read tensors on the host

    @abstractmethod
    def reserve(self, rows: int, n_steps: int) -> None:
        """Clear the cache, and reserve `n_steps` steps for each row."""

    @abstractmethod
    def forward(self, codes: Tensor, at: Tensor) -> Tensor:
        """Logits `[R, n, K, V]` of what follows codes `[R, n, K]` at steps `at` `[R, n]`, in order;
        what the cache holds from the first step on is overwritten.
        """


class DelayWindow(TokenModel):
    """Wraps a decoder of steps.

    A prompt is one token that stands for everything that is given; its id means nothing.

    Args:
        cells: the slots' cells; none of them in step 0.
        given: `[R, S, K]` int64, codes of all other cells; what it has in `cells` is not read.
        end: code of a cell whose token is V, the last id of the stream; None: there is no such id.
    """

    own_prompt = None
    offers = TokenModel.offers | {"captured steps"}

    def __init__(
        self, model: Any, steps: StepDecoder, cells: Cells, given: Tensor, end: int | None = None
    ) -> None:
        self.model = model
        self.vocab_size = steps.vocab_size + (end is not None)
        self.pass_options: dict[str, Any] = {}
        self._steps = steps
        self._given = given.clamp(min=0)  # cells that no draft has reached hold a code, too
        self._end = end
        self._n_given = int(cells.step[0])  # steps before the first one with a slot
        self._spans: dict[int, int] = {}  # steps that passes of a width need
        step = cells.step.to(given.device)
        book = cells.book.to(given.device)
        # entry i of a row is the token of slot i - 1; entry 0 is the prompt's, and lies outside
        n_steps = given.shape[1]
        self._step = pad(step, (1, 1), value=n_steps)  # [L + 2]
        self._book = pad(book, (1, 1))
        self._n_slots = len(step)
        before = torch.cat([step[:1], step[:-1]])  # of the slot before, whose code is new
        self._first = torch.minimum(step - 1, before)  # [L], first step of a pass from a slot on
        self._codes = given

    @property
    def device(self) -> torch.device:
        return find_device(self.model)

    def reserve(self, rows: int, positions: int) -> None:
        self._steps.reads_back = reads_back(self)
        self._steps.reserve(rows, self._given.shape[1])
        self._codes = pad(self._given, (0, 0, 0, 1))  # the last step is never read

    @torch.no_grad()
    def process_prompt(self) -> PromptCost | None:
        """Process the steps before the one that scores the first slot."""
        n_steps = self._n_given - 1
        if n_steps < 1:
            return None
        rows = len(self._codes)
        at = torch.arange(n_steps, device=self._codes.device).expand(rows, -1)
        self._steps.forward(self._codes[:, :n_steps], at)
        return PromptCost(rows * n_steps, 1)

    @torch.no_grad()
    def forward(self, entries: Pass) -> Tensor:
        """Cost: a pass over as many steps as `W` slots lie in at most, and one."""
        indices = entries.indices
        self._write(indices, entries.tokens)
        slot = indices.clamp(max=self._n_slots - 1)  # [R, W], scored by the entries
        source = self._step[slot + 1] - 1  # the step whose logits score a slot
        first = self._first[slot[:, 0]]
        n_steps = self._find_span(indices.shape[1])
        at = first[:, None] + torch.arange(n_steps, device=first.device)
        row = torch.arange(len(at), device=at.device)[:, None]
        codes = self._codes[row, at.clamp(max=self._codes.shape[1] - 1)]  # [R, n, K]
        logits = self._steps.forward(codes, at)
        scores = logits[row, source - first[:, None], self._book[slot + 1]]
        return scores if self._end is None else pad(scores, (0, 1))

    def _write(self, indices: Tensor, tokens: Tensor) -> None:
        """Write tokens `[R, W]` of entries `[R, W]` to their cells."""
        entry = indices.clamp(max=self._n_slots + 1)
        codes = tokens
        if self._end is not None:
            codes = torch.where(tokens < self._steps.vocab_size, tokens, self._end)
        row = torch.arange(len(entry), device=entry.device)[:, None]
        self._codes[row, self._step[entry], self._book[entry]] = codes

    def _find_span(self, width: int) -> int:
        """The most steps that a pass of some width needs; one host synchronisation a width."""
        if width not in self._spans:
            last = torch.arange(self._n_slots, device=self._step.device) + width - 1
            source = self._step[last.clamp(max=self._n_slots - 1) + 1] - 1
            self._spans[width] = int((source - self._first).max()) + 1
        return self._spans[width]


def list_cells(chosen: Tensor) -> Cells:
    """The cells of a mask `[S, K]` bool, step by step."""
    step, book = chosen.nonzero(as_tuple=True)
    return Cells(step, book)


def arrange(tokens: Tensor, cells: Cells, given: Tensor) -> Tensor:
    """A grid `[B, S, K]` with tokens `[B, L]` in their cells, and what is given in all others."""
    grid = given.clone()
    grid[:, cells.step.to(given.device), cells.book.to(given.device)] = tokens.to(given.device)
    return grid
