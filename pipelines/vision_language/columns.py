"""Columns of a prompt that stay: chosen, gathered, and the call that is left of them.

A kept column has the position that it had. Rows of a batch have counts of their own and are padded
on the left again.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmaccel.pipelines.generate_call import GenerateCall
from mmaccel.pipelines.vision_language.visuals import (
    Visual,
    find_placeholder,
    flatten_features,
    join_features,
    split_features,
)
from mmaccel.reduction.visual_tokens.plan import Plan, reduce

HIDDEN = -1e4  # a mask of numbers hides what has this or less
_PER_COLUMN = ("token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class ChosenColumns:
    """Columns of rows, as indices.

    Attributes:
        index: `[B, N]` int64, those of a row in order, then others.
        valid: `[B, N]` bool, False after a row's last.
    """

    index: Tensor
    valid: Tensor

    @classmethod
    def of(cls, chosen: Tensor) -> ChosenColumns:
        """Those where `chosen` `[B, T]` bool."""
        counts = chosen.sum(1)
        width = int(counts.max())
        index = (~chosen).long().argsort(dim=1, stable=True)[:, :width]
        return cls(index, torch.arange(width, device=counts.device) < counts[:, None])

    def take(self, values: Tensor) -> Tensor:
        """`[B, N, ...]` of `[B, T, ...]`."""
        index = self.index.view(*self.index.shape, *[1] * (values.ndim - 2))
        return values.gather(1, index.expand(*self.index.shape, *values.shape[2:]))

    def mark(self, others: Tensor, plan: Plan) -> Tensor:
        """`[B, T]` bool: `others`, and the columns that a plan keeps."""
        stays = others.clone()
        kept = self.index.gather(1, plan.keep.clamp(0))
        rows = torch.arange(len(kept), device=kept.device)[:, None].expand_as(kept)
        stays[rows[plan.valid], kept[plan.valid]] = True
        return stays

    def put(self, hidden: Tensor, x: Tensor, plan: Plan) -> Tensor:
        """The states `[B, T, D]` with those of merged slots at the columns that stand for them."""
        if not plan.merges:
            return hidden
        made = reduce(x, plan)
        at = self.index.gather(1, plan.keep.clamp(0))
        rows = torch.arange(len(at), device=at.device)[:, None].expand_as(at)
        hidden = hidden.clone()
        hidden[rows[plan.valid], at[plan.valid]] = made[plan.valid]
        return hidden


def order_columns(stays: Tensor) -> Tensor:
    """`[B, T']` int64: the columns where `stays` `[B, T]` bool, in order, after padding."""
    width = int(stays.sum(1).max())
    return stays.long().argsort(dim=1, stable=True)[:, -width:]


def take_columns(values: Tensor, order: Tensor) -> Tensor:
    """`[..., B, T']` of `[..., B or 1, T]`, in an order `[B, T']`."""
    full = values.expand(*values.shape[:-2], len(order), -1)
    return full.gather(-1, order.expand(*full.shape[:-1], -1))


def take_states(states: Tensor, order: Tensor) -> Tensor:
    """`[B, T', D]` of `[B, T, D]`, in an order `[B, T']`."""
    return states.gather(1, order[..., None].expand(-1, -1, states.shape[-1]))


def split_rows(values: Tensor, chosen: Tensor) -> list[Tensor]:
    """Of each row of `values` `[B, T]`, those where `chosen` `[B, T]` bool, on the CPU."""
    return [row[own].cpu() for row, own in zip(values, chosen, strict=True)]


def shorten_mask(mask: Tensor | None, order: Tensor, is_real: Tensor) -> Tensor | None:
    """A mask `[B, 1, T', T']` of numbers for the columns `order` `[B, T']`; None: causal alone."""
    if mask is None and bool(is_real.all()):
        return None
    batch, width = order.shape
    hidden = ~is_real[:, None, None, :]
    if mask is None:
        causal = torch.ones(width, width, dtype=torch.bool, device=order.device).tril()
        hidden = hidden | ~causal
    else:
        mask = mask.expand(batch, -1, -1, -1)
        mask = mask.gather(2, order[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3]))
        mask = mask.gather(3, order[:, None, None, :].expand(-1, mask.shape[1], width, -1))
        hidden = hidden | (~mask if mask.dtype == torch.bool else mask <= HIDDEN)
    # the diagonal stays, so that padding has no NaN
    hidden = hidden & ~torch.eye(width, dtype=torch.bool, device=order.device)
    made = torch.zeros(hidden.shape, device=order.device, dtype=torch.float32)
    return made.masked_fill_(hidden, torch.finfo(torch.float32).min / 4)


def find_kept(visuals: Sequence[Visual], plan: Plan, is_whole: Sequence[bool]) -> list[Tensor]:
    """Of each image, the indices among its features that a plan keeps; all where it is whole."""
    return [
        torch.arange(len(v.features)) if whole else plan.keep[k][plan.valid[k]].cpu()
        for k, (v, whole) in enumerate(zip(visuals, is_whole, strict=True))
    ]


def reduce_visuals(
    call: GenerateCall, visuals: Sequence[Visual], plan: Plan, is_whole: Sequence[bool]
) -> GenerateCall:
    """The call with the tokens of one modality reduced by a plan.

    Args:
        visuals: all images, or all videos, of the call.
        plan: a row for each of them.
        is_whole: those of which nothing is to change.
    """
    modality = visuals[0].modality
    encoded = dict(call.others["mm_encoder_outputs"])
    output = copy(encoded[modality])
    kept = find_kept(visuals, plan, is_whole)

    def shorten(features: Sequence[Tensor]) -> list[Tensor]:
        made = reduce(pad_sequence(list(features), batch_first=True), plan)
        return [
            f if whole else m[: len(k)]
            for f, m, k, whole in zip(features, made, kept, is_whole, strict=True)
        ]

    pooled = output.pooler_output
    output.pooler_output = join_features(shorten(split_features(pooled)), pooled)
    deep = getattr(output, "deepstack_features", None)
    if deep is not None:
        output.deepstack_features = [shorten(features) for features in deep]
    encoded[modality] = output

    stays = (call.ids != find_placeholder(call.model, modality)) & call.mask.to(call.ids.device)
    for visual, own in zip(visuals, kept, strict=True):
        stays[visual.row, visual.columns[own.to(visual.columns.device)]] = True
    return shorten_call(call, stays, encoded)


def keep_columns(call: GenerateCall, stays: Tensor) -> GenerateCall:
    """The call with the columns where `stays` `[B, T]` bool, and the features of those."""
    encoded = dict(call.others["mm_encoder_outputs"])
    for modality, output in encoded.items():
        kept = stays[call.ids == find_placeholder(call.model, modality)]
        made = copy(output)
        own = flatten_features(output.pooler_output)[kept]
        made.pooler_output = join_features([own], output.pooler_output)
        deep = getattr(output, "deepstack_features", None)
        if deep is not None:
            made.deepstack_features = [[flatten_features(layer)[kept]] for layer in deep]
        encoded[modality] = made
    return shorten_call(call, stays, encoded)


def shorten_call(call: GenerateCall, stays: Tensor, encoded: dict[str, Any]) -> GenerateCall:
    """The call with the columns where `stays` `[B, T]` bool, and other encoder outputs."""
    order = order_columns(stays)
    mask = stays.gather(1, order)
    positions = call.others.get("position_ids")
    if positions is None:
        positions = (call.mask.long().cumsum(1) - 1).clamp(min=0)
    others = {**call.others, "mm_encoder_outputs": encoded, "attention_mask": mask.long()}
    others["position_ids"] = take_columns(positions.to(order.device), order)
    for name in _PER_COLUMN:
        if others.get(name) is not None:
            others[name] = take_columns(others[name].to(order.device), order)
    ids = take_columns(call.ids.to(order.device), order).where(mask, _find_filler(call))
    return replace(call, ids=ids, others=others)


def _find_filler(call: GenerateCall) -> int:
    """An id of padding that stands for no image."""
    taken = {find_placeholder(call.model, name) for name in call.others["mm_encoder_outputs"]}
    return next(value for value in range(len(taken) + 1) if value not in taken)
