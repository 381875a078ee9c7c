"""A trial before anything is kept: is a model block-causal, and how does it take a 4-D mask?

Two questions. *The pipeline's own call*, ids with a 2-D mask: published models answer it in four
ways. LLaDA2.0 and 2.1 as released refuse a 2-D mask; ports of them read it causally, token by
token; others attend to everything that is visible; and a model may make its own block mask of it.
Only what depends on no later block can be kept. *The block mask of the model's own generate*, a 4-D
one: there it is block-causal by construction, if the mask is taken at its word.

T. Bie et al., "LLaDA2.0: Scaling Up Diffusion Language Models to 100B", 2025, arXiv 2512.15745,
section 5.4 (a block is sampled given the blocks before it).

Departures: nothing is believed of a configuration or a name; both questions are answered by logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import NumericsError
from mmaccel.pipelines.block_reads import READINGS, is_same, make_reads, other_tokens
from mmaccel.pipelines.place_store import FORMS, StoredCalls

_BLOCKS = 3  # one that is kept, one that is written over it, one that must not be seen


@dataclass(frozen=True)
class Verdict:
    """What a trial found.

    Attributes:
        reading: one of `READINGS`, what a pass over the store has to be shown.
        form: one of `FORMS`.
        reason: why nothing can be kept; empty where it can.
    """

    reading: str = READINGS[0]
    form: str = FORMS[0]
    reason: str = ""


@dataclass(frozen=True)
class Line:
    """Inputs of a call as the pipeline makes it.

    Attributes:
        ids, visible, positions: `[R, N]` int64; `visible` is the 2-D mask.
        block: columns per block, a divisor of N.
    """

    ids: Tensor
    visible: Tensor
    positions: Tensor
    block: int

    @property
    def is_ragged(self) -> bool:
        """Whether the mask hides anything; models may take another road then."""
        return not bool(self.visible.all())

    @staticmethod
    def made_up(device: torch.device, block: int) -> Line:
        """Two rows of one block of any tokens."""
        ids = torch.arange(2 * block, device=device).view(2, block) % 7
        columns = torch.arange(block, device=device).expand_as(ids)
        return Line(ids, torch.ones_like(ids), columns, block)

    def long_enough(self) -> Line:
        """The same with as many blocks behind it as the trial needs."""
        lacking = _BLOCKS * self.block - self.ids.shape[1]
        if lacking <= 0:
            return self
        extra = torch.arange(lacking, device=self.ids.device)
        shape = (self.ids.shape[0], -1)
        return Line(
            torch.cat([self.ids, self.ids[:, -1:].expand(-1, lacking)], 1),
            torch.cat([self.visible, torch.ones_like(extra).expand(shape)], 1),
            torch.cat([self.positions, (self.positions[:, -1:] + 1 + extra).expand(shape)], 1),
            self.block,
        )

    def changed(self, first: int, last: int, vocab_size: int) -> Line:
        """The same with other tokens in columns `first..last - 1`."""
        ids = self.ids.clone()
        ids[:, first:last] = other_tokens(ids[:, first:last], vocab_size)
        return replace(self, ids=ids)


@torch.no_grad()
def try_call(line: Line, call: Callable[[Line], Tensor], store: StoredCalls) -> Verdict:
    """Whether the call a pipeline makes can be had from kept keys and values.

    Args:
        line: of the call.
        call: makes it: logits `[R, N, V]`. What it raises reaches the caller.
        store: sets its `form`.

    Raises:
        NumericsError: logits that are no numbers.

    Cost: two passes over the line, and about one more for each way to show it that is tried.
    """
    line = line.long_enough()
    own = call(line)
    _check_numbers(own, line)
    n, block = line.ids.shape[1], line.block
    later = call(line.changed(n - block, n, own.shape[-1]))
    before = line.visible[:, : n - block].bool()
    if not is_same(own[:, : n - block], later[:, : n - block], before, store.dtype):
        return Verdict(
            reason=f"logits of earlier blocks of {block} change with later ones under the 2-D mask "
            "that the pipeline passes, so their keys and values cannot be kept"
        )
    tail = slice(n - 2 * block, n)
    begun = line.visible.bool().cummax(1).values  # padding on the left says nothing
    for reading in READINGS:
        for form in FORMS:
            got = _attempt(line, store, form, reading)
            if got is not None and is_same(own[:, tail], got, begun[:, tail], store.dtype):
                return Verdict(reading, form)
    return Verdict(reason="no pass over kept keys and values gives the logits of the model's call")


@torch.no_grad()
def try_mask(line: Line, store: StoredCalls) -> Verdict:
    """Whether a model takes a 4-D block mask at its word, with and without kept keys and values.

    Args:
        line: any; all of it is taken as visible.
        store: sets its `form`.

    Raises:
        NumericsError: logits that are no numbers.

    Cost: at most four passes over the line for each form of a mask that is tried.
    """
    line = replace(line, visible=torch.ones_like(line.visible)).long_enough()
    n, block = line.ids.shape[1], line.block
    everywhere = line.visible.bool()
    for form in FORMS:
        own = _attempt(line, store, form, "blocks", whole=True)
        if own is None:
            continue
        _check_numbers(own, line)
        vocab_size = own.shape[-1]
        later = _attempt(line.changed(n - block, n, vocab_size), store, form, "blocks", True)
        within = _attempt(line.changed(n - 1, n, vocab_size), store, form, "blocks", True)
        got = _attempt(line, store, form, "blocks")
        if later is None or within is None or got is None:
            continue
        dtype, before = store.dtype, everywhere[:, : n - block]
        tail, inside = slice(n - 2 * block, n), slice(n - block, n - 1)
        is_blind = is_same(own[:, : n - block], later[:, : n - block], before, dtype)
        sees = block == 1 or not is_same(
            own[:, inside], within[:, inside], everywhere[:, inside], torch.float64
        )
        if is_blind and sees and is_same(own[:, tail], got, everywhere[:, tail], dtype):
            return Verdict(form=form)
    return Verdict(reason=f"the model does not follow a 4-D mask of blocks of {block}")


def _check_numbers(logits: Tensor, line: Line) -> None:
    if bool(logits[line.visible.bool()].isnan().any()):
        raise NumericsError(
            "logits: expected numbers, received NaN; check the model's dtype and weights"
        )


def _attempt(
    line: Line, store: StoredCalls, form: str, reading: str, whole: bool = False
) -> Tensor | None:
    """Logits of the last two blocks behind kept ones, or of everything; None where it fails."""
    n, block = line.ids.shape[1], line.block
    store.form = form
    store.reserve(line.ids.shape[0], n)
    bounds = [0, n] if whole else [0, n - 2 * block, n]
    columns = torch.arange(n, device=line.ids.device).expand_as(line.ids)
    logits: Any = None
    try:
        for first, last in zip(bounds, bounds[1:]):
            fed = slice(first, last)
            reads = make_reads(line.visible, first, last, block, reading)
            logits = store.run(line.ids[:, fed], line.positions[:, fed], columns[:, fed], reads)
    except (TypeError, ValueError, RuntimeError, AttributeError, AssertionError):
        return None  # a mask or a cache the model does not take; another form may do
    return logits if isinstance(logits, Tensor) else None
