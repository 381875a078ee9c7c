"""Revision: committed tokens are taken back or replaced, between a commit and the next pass.

*Shadow* (`ShadowReviser`): tokens are taken back that the other tokens do not make likely. F. Hong
et al., "Wide-In, Narrow-Out: Revokable Decoding for Efficient and Effective DLLMs" (WINO), ICLR
2026, arXiv 2507.18578, section 4.2, with the bounds of its release. A shadow is a further mask
token at a committed slot's position, which attends to what the slot's entry attends to and to
itself, but not to that entry; no entry attends to shadows. With several layers the states of other
entries depend on the token, so that it is left out only up to that. Termination: a pass takes back
fewer slots than the pass before committed, and none at a block's first pass; so with a_t commits at
pass t at least a_T + (T - 1) slots are committed after T passes, and a block of n slots takes at
most n. Departures: shadows have cache indices of their own, so that they work with a cache; several
blocks and rows at once; per row; a stop token is not taken back.

*Edit* (`EditReviser`): a committed token is replaced where the model, which sees it and is trained
to edit, prefers another. T. Bie et al., "LLaDA2.1: Speeding Up Text Diffusion via Token Editing",
2026, arXiv 2602.08676, section 2 (mask-to-token and token-to-token updates in one pass).
Termination: every pass over a block with an open slot commits one; over a full block there are at
most `budget` more. Departures: per row; a stop token stays; a row goes on to the next block once
nothing is to be replaced.

*Redo* (`RedoReviser`): once a block is full, slots of low confidence are decoded again, one a pass.
The confidence is the one before the commit, as in MaskGIT (H. Chang et al., CVPR 2022, arXiv
2202.04200): a model is confident of a wrong token once it sees it. Termination: every block is
redone once, so that n slots take at most 2 n passes. Source: a practice of users, no paper.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from mmaccel.contracts import CanvasPass
from mmaccel.samplers.canvas.layout import Columns
from mmaccel.samplers.canvas.model_pass import ModelPass
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.selector import top
from mmaccel.samplers.canvas.state import Canvas


class Reviser:
    """Revises B rows by `least` (see `RevisedParallel`); `budget`: passes over a full block."""

    def __init__(self, run: CanvasRun, least: float, budget: int = 0) -> None:
        self._run, self._least, self._budget = run, least, budget
        self._start = torch.full_like(run.canvas.start, -1)  # the block of the last pass

    def restart(self, batch_slots: Tensor) -> None:
        self._start = self._start.index_fill(0, batch_slots, -1)

    def max_commits(self, predictions: SlotPredictions) -> Tensor:
        """`[B]` int64, slots that may be committed at this pass."""
        return predictions.is_open.sum(1)

    def revisable(self) -> Tensor:
        """`[B, Q]` bool, committed slots of the active block but those given and stop tokens."""
        canvas, slots = self._run.canvas, self._run.slots
        may = canvas.is_committed & ~canvas.is_given
        if canvas.stop_tokens is not None:
            may = may & ~(canvas.tokens[..., None] == canvas.stop_tokens).any(-1)
        end = torch.minimum(canvas.end, canvas.limit)[:, None]
        return may.gather(1, slots.clamp(max=canvas.length - 1)) & (slots < end)

    def is_full(self) -> Tensor:
        """`[B]` bool, rows whose active block has no open slot left."""
        canvas = self._run.canvas
        return ~canvas.active().any(1) & (canvas.start < canvas.limit)

    @abstractmethod
    def revise(self, predictions: SlotPredictions, new: Tensor) -> None:
        """Change what is committed in the pass's active blocks; it committed `new` `[B, Q]`."""


class EditReviser(Reviser):
    """Replaces tokens where another has a probability above `least`."""

    def __init__(self, run: CanvasRun, least: float, budget: int = 0) -> None:
        super().__init__(run, least, budget)
        self._extra = torch.zeros_like(run.canvas.start)  # passes over the block, once full

    def revise(self, predictions: SlotPredictions, new: Tensor) -> None:
        run, canvas, slots = self._run, self._run.canvas, self._run.slots
        self._extra = torch.where(canvas.start == self._start, self._extra, 0)
        self._start = canvas.start
        probability, best = predictions.logits.softmax(-1).max(-1)  # [B, Q]
        is_other = best != canvas.tokens.gather(1, predictions.slots)
        candidates = self.revisable() & ~new
        run.mark_invalid((candidates & probability.isnan()).any(1))
        edited = candidates & is_other & (probability > self._least)
        canvas.replace(canvas.spread(slots, edited, False), canvas.spread(slots, best, 0))
        goes_on = ~canvas.stays_in_block | edited.any(1)
        canvas.stays_in_block = self.is_full() & goes_on & (self._extra < self._budget)
        self._extra = self._extra + canvas.stays_in_block


class RedoReviser(Reviser):
    """Opens slots again that were committed with less than `least`, and their neighbours."""

    def __init__(self, run: CanvasRun, least: float, budget: int = 0) -> None:
        super().__init__(run, least, budget)
        self._is_redoing = torch.zeros_like(run.canvas.stays_in_block)
        self._confidence = torch.ones_like(run.canvas.tokens, dtype=torch.float32)

    def max_commits(self, predictions: SlotPredictions) -> Tensor:
        """One in a block that is redone."""
        is_redoing = self._is_redoing & (self._run.canvas.start == self._start)
        return torch.where(is_redoing, 1, predictions.is_open.sum(1))

    def revise(self, predictions: SlotPredictions, new: Tensor) -> None:
        canvas, slots = self._run.canvas, self._run.slots
        self._is_redoing = self._is_redoing & (canvas.start == self._start)
        self._start = canvas.start
        is_new = canvas.spread(slots, new, False)
        peak = canvas.spread(slots, predictions.peak.where(new, 1.0), True)
        self._confidence = torch.where(is_new, peak, self._confidence)
        revisable = self.revisable()
        is_low = revisable & (self._confidence.gather(1, predictions.slots) < self._least)
        near = max_pool1d(is_low[:, None].float(), 3, 1, 1)[:, 0] > 0
        due = self.is_full() & ~self._is_redoing
        canvas.reopen(canvas.spread(slots, near & revisable & due[:, None], False))
        self._is_redoing = self._is_redoing | due


class ShadowReviser(Reviser):
    """Takes back tokens whose probability without them is below `least`."""

    def __init__(self, run: CanvasRun, least: float, budget: int = 0) -> None:
        super().__init__(run, least, budget)
        self._last = torch.ones_like(run.canvas.start)  # slots that the last pass committed

    def max_commits(self, predictions: SlotPredictions) -> Tensor:
        """Seven tenths of the open slots, but 5 to 20."""
        return (0.7 * predictions.is_open.sum(1)).long().clamp(5, 20)

    def revise(self, predictions: SlotPredictions, new: Tensor) -> None:
        run, canvas = self._run, self._run.canvas
        assert isinstance(run.model_pass, ShadowPass)
        left_out = run.model_pass.left_out
        n_new = new.sum(1)
        most = torch.where(canvas.start == self._start, self._last - 1, 0)
        most = torch.where(n_new > 1, most, 0)
        candidates = self.revisable() & ~new
        run.mark_invalid((candidates & left_out.isnan()).any(1))
        back = top(-left_out, candidates & (left_out < self._least), most)
        canvas.reopen(canvas.spread(run.slots, back, False))
        self._start = canvas.start
        self._last = n_new


class ShadowPass(ModelPass):
    """`ModelPass` as "entries" with shadows.

    `left_out` `[B, Q]` float32: a token's probability without it; 1 where nothing is checked.
    """

    left_out: Tensor

    def extra_cache_indices(self, width: int) -> int:
        """One for every slot of a block."""
        return width

    def plan(self, canvas: Canvas, tokens: Tensor, slots: Tensor) -> tuple[CanvasPass, Tensor]:
        """A shadow of every committed slot is counted, too."""
        entries, n_entries = super().plan(canvas, tokens, slots)
        checked = canvas.is_committed & ~canvas.is_given
        end = torch.minimum(canvas.end, canvas.limit)[:, None]
        self._checked = checked.gather(1, slots) & (self.slots(canvas) < end)  # [B, Q]
        assert canvas.mask_token is not None
        entries = with_shadows(entries, self.columns, self._checked, canvas.mask_token)
        return entries, n_entries + self._checked.sum() * self.columns.branches

    def predict(
        self, logits: Tensor, canvas: Canvas, slots: Tensor, is_open: Tensor, copies: int
    ) -> SlotPredictions:
        """`logits` are those of slots and of their shadows."""
        of_slots, shadows = logits.chunk(2, 1)
        model = super().predict(shadows, canvas, slots, self._checked, copies).logits
        last = model.shape[-1] - 1  # the mask token may lie beyond; such slots are not checked
        tokens = canvas.tokens.gather(1, slots).clamp(max=last)[..., None]
        probability = model.softmax(-1).gather(-1, tokens)[..., 0]
        self.left_out = torch.where(self._checked, probability, 1.0)
        return super().predict(of_slots, canvas, slots, is_open, copies)


def with_shadows(
    entries: CanvasPass, columns: Columns, checked: Tensor, mask_token: int
) -> CanvasPass:
    """A pass (as entries, of one canvas) with a shadow for every slot whose logits are wanted,
    those not `checked` `[B, Q]` padding: C + Q entries, 2 Q queries, those of shadows last.

    Where logits are shifted, those of a shadow are a twin's, of which there are Q more: a copy of
    the entry before the slot, which attends to the shadow instead of the slot's entry, and to which
    nothing attends.
    """
    rows, count = entries.tokens.shape
    queries, n = entries.queries, entries.queries.shape[1]  # [R, Q]
    index = torch.arange(n, device=queries.device)
    slots = (queries + columns.shift).clamp(max=count - 1)  # entries of the slots
    slot_indices = entries.cache_indices.gather(1, slots)[..., None]  # [R, Q, 1]
    last = columns.cache_size - 1
    shadows = torch.where(checked.repeat(columns.branches, 1), last - n + index, last)  # [R, Q]
    reads = entries.reads.expand(-1, count, -1)

    def copy(tokens: Tensor, at: Tensor, cache_indices: Tensor) -> tuple[Tensor, ...]:
        """Entries that attend to shadows where those `at` attend to slots."""
        copied = reads.gather(1, at[..., None].expand(-1, -1, columns.cache_size))  # [R, Q, P]
        sees = copied.gather(2, slot_indices)
        copied = copied.scatter(2, slot_indices, False).scatter(2, shadows[..., None], sees)
        copied[..., -1] = False
        return tokens, entries.positions.gather(1, at), cache_indices, copied

    added = [copy(torch.full_like(slots, mask_token), slots, shadows)]
    if columns.shift:
        tokens = entries.tokens.gather(1, queries)
        added.append(copy(tokens, queries, torch.full_like(shadows, last)))
    of_slots = entries.tokens, entries.positions, entries.cache_indices, reads
    tokens, positions, cache_indices, reads = (
        torch.cat(parts, 1) for parts in zip(of_slots, *added, strict=True)
    )
    of_shadows = (tokens.shape[1] - n + index).expand(rows, -1)  # the last ones, twins if any
    return CanvasPass(
        tokens=tokens,
        positions=positions,
        cache_indices=cache_indices,
        reads=reads,
        queries=torch.cat([queries, of_shadows], 1),
    )
