"""The call that is left of one whose prompt loses columns: ids, masks, positions and features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmaccel.errors import ShapeError
from mmaccel.pipelines.hosts.generate_call import GenerateCall
from mmaccel.pipelines.hosts.prompt_cuts.columns import LeavingColumns, order_columns, take_columns
from mmaccel.pipelines.hosts.vision_language.visuals import (
    change_features,
    find_placeholder,
    split_features,
)
from mmaccel.reduction.visual_tokens.plan import Plan, reduce

_PER_COLUMN = ("position_ids", "token_type_ids", "mm_token_type_ids")


def find_visual_columns(call: GenerateCall) -> LeavingColumns:
    """Those of visual tokens, which methods of `visual_tokens=` may drop."""
    mask = call.mask.to(call.device)
    marks = torch.tensor(_find_marks(call), device=call.device, dtype=torch.int64)
    is_visual = torch.isin(call.ids.to(call.device), marks) & mask
    return LeavingColumns("visual_tokens", "visual tokens", mask, is_visual)


def put_merged(output: Any, plan: Plan) -> Any:
    """An encoder's output with merged slots' features, by a plan with a row an image or video."""

    def merge(features: list[Tensor]) -> list[Tensor]:
        slots = reduce(pad_sequence(features, batch_first=True), plan)
        merged = [image.clone() for image in features]
        for image, kept, used, states in zip(merged, plan.keep, plan.valid, slots, strict=True):
            image[kept[used]] = states[used]
        return merged

    return change_features(output, merge)


def keep_columns(call: GenerateCall, stays: Tensor) -> GenerateCall:
    """The call with the columns where `stays` `[B, T]` bool, and the features of those."""
    encoded = call.others.get("mm_encoder_outputs") or {}
    order = order_columns(stays)
    mask = stays.gather(1, order)
    positions = call.others.get("position_ids")
    if positions is None:
        positions = (call.mask.long().cumsum(1) - 1).clamp(min=0)
    others = {**call.others, "attention_mask": mask.long(), "position_ids": positions}
    for name in _PER_COLUMN:
        if others.get(name) is not None:
            others[name] = take_columns(others[name].to(order.device), order)
    if encoded:
        others["mm_encoder_outputs"] = {
            modality: take_features(call.model, modality, output, call.ids, stays)
            for modality, output in encoded.items()
        }
    marks = _find_marks(call)  # padding is none of these
    filler = next(value for value in range(len(marks) + 1) if value not in marks)
    ids = take_columns(call.ids.to(order.device), order).where(mask, filler)
    return replace(call, ids=ids, others=others)


def take_features(model: Any, modality: str, output: Any, ids: Tensor, stays: Tensor) -> Any:
    """An encoder's output with the features of the columns where `stays` alone, both `[B, T]`."""
    kept = stays[ids == find_placeholder(model, modality)]
    n_features = sum(map(len, split_features(output.pooler_output)))
    if len(kept) != n_features:
        raise ShapeError(
            f"{modality}: expected a placeholder for each of the {n_features} features, "
            f"received {len(kept)} in the prompt; pass the processor's ids as they are"
        )
    return change_features(output, lambda features: [torch.cat(features)[kept]])


def _find_marks(call: GenerateCall) -> list[int]:
    """Ids that stand for features of the prompt."""
    encoded = call.others.get("mm_encoder_outputs") or {}
    return [find_placeholder(call.model, name) for name in encoded]
