"""The call that is left of one whose prompt loses columns: ids, masks, positions and features."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmaccel.errors import ShapeError
from mmaccel.pipelines.generate_call import GenerateCall
from mmaccel.pipelines.prompt_cuts.columns import LeavingColumns, order_columns, take_columns
from mmaccel.pipelines.vision_language.visuals import (
    Visual,
    find_placeholder,
    flatten_features,
    join_features,
    split_features,
)
from mmaccel.reduction.visual_tokens.plan import Plan, reduce

_PER_COLUMN = ("token_type_ids", "mm_token_type_ids")


def find_visual_columns(call: GenerateCall) -> LeavingColumns:
    """Those of visual tokens, which methods of `visual_tokens=` may drop."""
    mask = call.mask.to(call.device)
    marks = torch.tensor(_find_marks(call), device=call.device, dtype=torch.int64)
    is_visual = torch.isin(call.ids.to(call.device), marks) & mask
    return LeavingColumns("visual_tokens", "visual tokens", mask, is_visual)


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
    encoded = {
        modality: take_features(call.model, modality, output, call.ids, stays)
        for modality, output in (call.others.get("mm_encoder_outputs") or {}).items()
    }
    return shorten_call(call, stays, encoded)


def take_features(model: Any, modality: str, output: Any, ids: Tensor, stays: Tensor) -> Any:
    """An encoder's output with the features of the columns where `stays` alone.

    Args:
        ids: `[B, T]` int64, of all columns.
        stays: `[B, T]` bool.

    Raises:
        ShapeError: features whose number is not that of the prompt's placeholders.
    """
    kept = stays[ids == find_placeholder(model, modality)]
    features = flatten_features(output.pooler_output)
    if len(kept) != len(features):
        raise ShapeError(
            f"{modality}: expected a placeholder for each of the {len(features)} features, "
            f"received {len(kept)} in the prompt; pass the processor's ids as they are"
        )
    made = copy(output)
    own = features[kept]
    made.pooler_output = join_features([own], output.pooler_output)
    deep = getattr(output, "deepstack_features", None)
    if deep is not None:
        made.deepstack_features = [[flatten_features(layer)[kept]] for layer in deep]
    return made


def _find_marks(call: GenerateCall) -> list[int]:
    """Ids that stand for features of the prompt."""
    encoded = call.others.get("mm_encoder_outputs") or {}
    return [find_placeholder(call.model, name) for name in encoded]


def shorten_call(call: GenerateCall, stays: Tensor, encoded: dict[str, Any]) -> GenerateCall:
    """The call with the columns where `stays` `[B, T]` bool, and other encoder outputs."""
    order = order_columns(stays)
    mask = stays.gather(1, order)
    positions = call.others.get("position_ids")
    if positions is None:
        positions = (call.mask.long().cumsum(1) - 1).clamp(min=0)
    others = {**call.others, "attention_mask": mask.long()}
    if encoded:
        others["mm_encoder_outputs"] = encoded
    others["position_ids"] = take_columns(positions.to(order.device), order)
    for name in _PER_COLUMN:
        if others.get(name) is not None:
            others[name] = take_columns(others[name].to(order.device), order)
    taken = _find_marks(call)  # padding stands for no image
    filler = next(value for value in range(len(taken) + 1) if value not in taken)
    ids = take_columns(call.ids.to(order.device), order).where(mask, filler)
    return replace(call, ids=ids, others=others)
