"""The images and videos of a `generate` call: their features, and their columns in the prompt.

An image here is a run of placeholders with as many features, in the order of `mm_encoder_outputs`;
a video is one run for each of its features, whatever text stands between.

Source: `_prepare_multimodal_encoder_kwargs_for_generation` of
`transformers.generation.utils.GenerationMixin`, 5.23, and `get_placeholder_mask` of the models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.generate_call import GenerateCall
from mmaccel.pipelines.hosts.vision_language.places import Places, find_places

_PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
}


@dataclass(frozen=True)
class Visual:
    """One image or video of a prompt."""

    modality: str  # "image" or "video"
    index: int  # among those of its modality that `generate` was called with
    row: int
    columns: Tensor  # [n] int64, of the row's prompt, ascending
    features: Tensor  # [n, D], as the model merges them with the text's embeddings
    places: Places


def find_visuals(call: GenerateCall, inputs: Mapping[str, Any], copies: int = 1) -> list[Visual]:
    """All images, then all videos, of a call with `copies` (`num_return_sequences`) a row."""
    visuals = list[Visual]()
    for modality, output in (call.others.get("mm_encoder_outputs") or {}).items():
        features = split_features(output.pooler_output)
        row, column = (call.ids == find_placeholder(call.model, modality)).nonzero().unbind(1)
        counts = [len(f) for f in features]
        if sum(counts) != len(row):
            raise UnsupportedModelError(
                f"visual_tokens: expected a placeholder for each of the {sum(counts)} {modality} "
                f"features, received {len(row)}; use the model's own processor"
            )
        if not features:
            continue
        rows = [int(runs[0]) for runs in row.split(counts)]
        # copies of a row have the images of the row that was given: an image is known by that
        # row, and by its number among the row's images
        keys = [(own // copies, rows[:k].count(own)) for k, own in enumerate(rows)]
        originals = sorted(set(keys))
        lengths = [counts[keys.index(key)] for key in originals]
        places = find_places(call.model, modality, lengths, inputs, features[0].device)
        for k, columns in enumerate(column.split(counts)):
            index = originals.index(keys[k])
            visuals.append(Visual(modality, index, rows[k], columns, features[k], places[index]))
    return visuals


def find_placeholder(model: Any, modality: str) -> int:
    """The id that stands for a feature in a prompt."""
    for name in _PLACEHOLDERS[modality]:
        value = getattr(model.config, name, None)
        if value is not None:
            return int(value)
    raise UnsupportedModelError(
        f"visual_tokens: expected a configuration with one of {_PLACEHOLDERS[modality]}, received "
        f"a {type(model).__name__} without"
    )


def find_placeholders(model: Any) -> frozenset[int]:
    """The ids that stand for features of any modality in a model's prompts."""
    names = (name for names in _PLACEHOLDERS.values() for name in names)
    values = (getattr(model.config, name, None) for name in names)
    return frozenset(int(value) for value in values if value is not None)


def find_seeds(rows: Sequence[int], seeds: Sequence[int]) -> list[int]:
    """A seed for each image: of its row of the prompt, and its place among the row's images."""
    if rows and len(seeds) <= max(rows):
        raise OptionError(
            f"seed: expected an integer or one for each of {max(rows) + 1} rows or more, received "
            f"{len(seeds)}; give one for each row"
        )
    return [
        (seeds[row] + 0x9E3779B97F4A7C15 * rows[:k].count(row)) % 2**63
        for k, row in enumerate(rows)
    ]


def split_features(pooled: Any) -> list[Tensor]:
    """Features `[n, D]` of each image from a model's: `[N, n, D]`, or such a list."""
    return [features for features in pooled if len(features)]


def change_features(output: Any, change: Callable[[list[Tensor]], list[Tensor]]) -> Any:
    """An encoder's output whose features `[n, D]` of each image were changed, DeepStack's too."""

    def change_pooled(pooled: Any) -> Any:
        features = change(split_features(pooled))
        return torch.cat(features)[None] if isinstance(pooled, Tensor) else features

    changed = copy(output)
    changed.pooler_output = change_pooled(output.pooler_output)
    deep = getattr(output, "deepstack_features", None)
    if deep is not None:
        changed.deepstack_features = [change_pooled(layer) for layer in deep]
    return changed
