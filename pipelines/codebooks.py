"""CodebookWindow: a model of several codebooks a step, decoded as a stream of single tokens.

Speech and music models predict C codes a step, one of each codebook: the input of a step is the sum
of the embeddings of its codes, and its output scores all C codes of the step that follows (J. Copet
et al., "Simple and Controllable Music Generation", NeurIPS 2023, section 2.2, the "parallel"
pattern; their delay pattern is the same over shifted codes).

Slot i of a row is codebook ``i % C`` of step ``i // C``, so that the loop, its policies and its
drafters see a stream of tokens as of any other model. Codes of one step do not depend on each
other: what is redrawn after a rejected code of a step is right already, is kept as the draft of the
next pass, and is accepted there. So a stream costs no more passes than a loop over whole steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import LAYER_METHODS, Pass, TokenModel
from mmaccel.errors import OptionError
from mmaccel.results import StepBytes


class CodebookWindow(TokenModel):
    """Wraps a model of steps as a model of codes.

    Shapes: **C** codebooks, **V** codes of each, **D** width, **S** steps of a pass.

    Args:
        steps: the model of steps, whose passes hold embeddings; its logits `[R, S, C * V]` score
            the codes of the step that follows, codebook by codebook.
        tables: `[C, V, D]`, the embeddings of each codebook's codes.

    Attributes:
        n_codebooks: C.

    Prompts begin with a whole step. `max_positions` counts codes.

    Raises:
        OptionError: a model that takes no embeddings, or whose logits are of another size.
    """

    def __init__(self, steps: TokenModel, tables: Tensor) -> None:
        self.n_codebooks, self.vocab_size, _ = tables.shape
        if not steps.takes_embeddings:
            raise OptionError(
                "steps: expected a model whose passes may hold embeddings, received a "
                f"{type(steps).__name__}; wrap a causal LM with CausalLMWindow"
            )
        n_logits = self.n_codebooks * self.vocab_size
        if steps.vocab_size != n_logits:
            raise OptionError(
                f"steps: expected {n_logits} logits, {self.vocab_size} for each of "
                f"{self.n_codebooks} codebooks, received {steps.vocab_size}; give it one head for "
                "all codebooks, one after the other"
            )
        self.steps = steps
        self.model = steps.model
        self.tables = tables
        if steps.max_positions is not None:
            self.max_positions = steps.max_positions * self.n_codebooks
        self._codes = tables.new_zeros(0, 0, dtype=torch.int64)  # [R, P], written so far

    @property
    def device(self) -> torch.device:
        """The device of tokens and logits."""
        return self.steps.device

    @property
    def packed_bytes(self) -> tuple[int, int]:
        """See `mmaccel.contracts.Model`."""
        return self.steps.packed_bytes

    @property
    def step_bytes(self) -> StepBytes | None:
        """See `mmaccel.contracts.Model`."""
        return self.steps.step_bytes

    @property
    def takes_whole_prompts(self) -> bool:
        """See `TokenModel`."""
        return self.steps.takes_whole_prompts

    def lack(self, word: str, part: Any = None) -> str:
        """See `mmaccel.capabilities.Capable`: its layers are those of the steps."""
        return self.steps.lack(word, part) if word in LAYER_METHODS else super().lack(word, part)

    def use_methods(self, methods: Any, branches: int = 1) -> None:
        self.steps.use_methods(methods, branches)

    def reserve(self, rows: int, positions: int) -> None:
        """See `mmaccel.contracts.Model.reserve`; positions count codes."""
        n_steps = -(-positions // self.n_codebooks)
        self.steps.reserve(rows, n_steps)
        self.block_counts = self.steps.block_counts
        # what a pass writes beyond the reserved codes goes to the last step and is never read
        room = (n_steps + 1) * self.n_codebooks
        self._codes = torch.zeros(rows, room, dtype=torch.int64, device=self.device)

    def forward(self, entries: Pass) -> Tensor:
        """One pass over the steps that entries belong to; see `TokenModel.forward`.

        Cost: a pass of the steps over ``(W + C - 2) // C + 1`` entries.
        """
        width = entries.tokens.shape[1]
        indices = self._write(entries)
        target = indices + 1  # [R, W], the slots that the entries' logits score
        source = target // self.n_codebooks - 1  # [R, W], the step in front of the target's
        first = source[:, 0]
        n_steps = (width + self.n_codebooks - 2) // self.n_codebooks + 1
        logits = self.steps.forward(self._embed(first, n_steps))
        self.n_evicted = self.steps.n_evicted
        by_book = logits.unflatten(-1, (self.n_codebooks, self.vocab_size))  # [R, S, C, V]
        row = torch.arange(len(indices), device=indices.device)[:, None]
        return by_book[row, source - first[:, None], target % self.n_codebooks]

    def prefill(self, entries: Pass) -> None:
        """See `TokenModel.prefill`. The step that scores the next code is left to `forward`, but
        where the steps take whole prompts.

        Cost: that of the steps, and two host synchronisations.
        """
        first = self._write(entries)[:, 0]
        start = first // self.n_codebooks
        lengths = entries.lengths
        n_before = int((first % self.n_codebooks).max())  # codes of a step that was begun before
        n_codes = n_before + entries.tokens.shape[1]
        n_steps = -(-n_codes // self.n_codebooks)
        if lengths is not None and int(lengths.max()) > entries.tokens.shape[1]:
            n_steps = n_codes // self.n_codebooks  # the next pass begins with one that is not whole
        if n_steps == 0:
            return
        steps = self._embed(start, n_steps)  # one that is not whole is written again
        if lengths is not None:
            n_ahead = 0 if self.takes_whole_prompts else 1
            n_left = (first + lengths + n_ahead) // self.n_codebooks - n_ahead - start
            if int(first.max()) and int(n_left.max()) <= 0:  # all whole steps were in passes before
                return
            steps = replace(steps, lengths=n_left)
        self.steps.prefill(steps)
        self.n_evicted = self.steps.n_evicted

    def _write(self, entries: Pass) -> Tensor:
        """Write the codes of a pass; their slots `[R, W]` int64."""
        indices = entries.indices
        at = indices.clamp(max=self._codes.shape[1] - 1)
        self._codes.scatter_(1, at, entries.tokens)
        return indices

    def _embed(self, first: Tensor, n_steps: int) -> Pass:
        """A pass over whole steps, `n_steps` of each row from `first` `[R]` on."""
        slot = torch.arange(n_steps * self.n_codebooks, device=first.device)
        at = first[:, None] * self.n_codebooks + slot
        codes = self._codes.gather(1, at.clamp(max=self._codes.shape[1] - 1))  # [R, S * C]
        book = slot % self.n_codebooks
        embedded = self.tables[book, codes].unflatten(1, (n_steps, -1)).sum(2)  # [R, S, D]
        return Pass(embedded, first)
