"""Columns of a prompt that a method may drop, those that it chose, and what is left. A kept column
has the position that it had; rows have counts of their own and are padded on the left again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.hosts.generate_call import GenerateCall
from mmaccel.pipelines.hosts.layers.masks import HIDDEN
from mmaccel.reduction.visual_tokens.contract import PromptReducer
from mmaccel.reduction.visual_tokens.plan import Plan, reduce


@dataclass(frozen=True)
class LeavingColumns:
    """The columns of a prompt that a method may drop."""

    slot: str  # the keyword of `attach` that the method was given by
    noun: str  # what they are
    mask: Tensor  # [B, T] bool, columns that are attended to
    may_leave: Tensor  # [B, T] bool, of these

    @classmethod
    def of_words(cls, call: GenerateCall, method: PromptReducer) -> LeavingColumns:
        """All but each row's first and newest ones."""
        mask = call.mask.to(call.device)
        place = mask.cumsum(1) - 1  # of a word in its row
        is_between = (place >= method.first) & (place < mask.sum(1, keepdim=True) - method.newest)
        return cls("prompt_tokens", "words", mask, is_between & mask)


@dataclass(frozen=True)
class ChosenColumns:
    """Columns of rows, as indices."""

    index: Tensor  # [B, N] int64, those of a row in order, then others
    valid: Tensor  # [B, N] bool, False after a row's last

    @classmethod
    def of(cls, chosen: Tensor) -> ChosenColumns:
        counts = chosen.sum(1)
        width = int(counts.max())
        index = (~chosen).long().argsort(dim=1, stable=True)[:, :width]  # chosen ones in front
        return cls(index, torch.arange(width, device=counts.device) < counts[:, None])

    def take(self, values: Tensor) -> Tensor:
        """`[B, N, ...]` of `[B, T, ...]`."""
        return take_states(values, self.index)

    def slots(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """Rows and columns of the tokens that stand for a plan's slots, `[n]` int64 each."""
        rows, slot = plan.valid.nonzero().unbind(1)
        return rows, self.index[rows, plan.keep[rows, slot]]

    def mark(self, others: Tensor, plan: Plan) -> Tensor:
        """`[B, T]` bool: `others`, and the columns that a plan keeps."""
        stays = others.clone()
        stays[self.slots(plan)] = True
        return stays

    def put(self, hidden: Tensor, x: Tensor, plan: Plan) -> Tensor:
        """The states `[B, T, D]` with those of merged slots at the columns that stand for them."""
        if not plan.merges:
            return hidden
        hidden = hidden.clone()
        hidden[self.slots(plan)] = reduce(x, plan)[plan.valid]
        return hidden


def order_columns(stays: Tensor) -> Tensor:
    """`[B, T']` int64: the columns where `stays` `[B, T]` bool, in order, after padding."""
    width = int(stays.sum(1).max())  # of the longest row; the others begin with padding
    return stays.long().argsort(dim=1, stable=True)[:, -width:]


def take_columns(values: Tensor, order: Tensor) -> Tensor:
    """`[..., B, T']` of `[..., B or 1, T]`, in an order `[B, T']`."""
    full = values.expand(*values.shape[:-2], len(order), -1)
    return full.gather(-1, order.expand(*full.shape[:-1], -1))


def take_states(states: Tensor, order: Tensor) -> Tensor:
    """`[B, T', ...]` of `[B, T, ...]`, in an order `[B, T']`."""
    index = order.view(*order.shape, *[1] * (states.ndim - 2))
    return states.gather(1, index.expand(*order.shape, *states.shape[2:]))


def take_places(given: Mapping[str, Any], order: Tensor) -> dict[str, Any]:
    """Of a layer's arguments positions and what was computed of them, in an order `[B, T']`."""
    places: dict[str, Any] = {}
    embeddings, ids = given.get("position_embeddings"), given.get("position_ids")
    if embeddings is not None:  # [B or 1, T, D] each
        wide = [values.expand(len(order), -1, -1) for values in embeddings]
        places["position_embeddings"] = tuple(take_states(values, order) for values in wide)
    if isinstance(ids, Tensor):
        places["position_ids"] = take_columns(ids, order)
    return places


def split_rows(values: Tensor, chosen: Tensor) -> list[Tensor]:
    """Of each row of `values` `[B, T]`, those where `chosen` `[B, T]` bool, on the CPU."""
    return [row[own].cpu() for row, own in zip(values, chosen, strict=True)]


def shorten_mask(mask: Tensor | None, order: Tensor, is_real: Tensor) -> Tensor | None:
    """A mask `[B, 1, T', T']` of numbers for the columns `order` `[B, T']`; None: causal alone."""
    width = order.shape[1]
    if mask is None:
        if bool(is_real.all()):
            return None
        seen = torch.ones(1, width, width, dtype=torch.bool, device=order.device).tril()
    else:
        seen = mask.expand(len(order), -1, -1, -1)[:, 0]
        seen = take_states(take_states(seen, order).mT, order).mT
        seen = seen if mask.dtype == torch.bool else seen > HIDDEN
    seen = seen & is_real[:, None]
    # the diagonal stays, so that padding has no NaN
    seen = seen | torch.eye(width, dtype=torch.bool, device=order.device)
    numbers = torch.zeros(seen.shape, device=order.device, dtype=torch.float32)
    return numbers.masked_fill_(~seen, torch.finfo(torch.float32).min / 4)[:, None]
