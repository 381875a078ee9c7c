"""The images and videos of a `generate` call: their features, and their columns in the prompt.

transformers encodes them before its loop (`mm_encoder_outputs`) and puts their features where the
prompt has placeholders, in order. An image here is a run of placeholders with as many features; a
video is one run for each of its features, whatever text stands between.

Source: `_prepare_multimodal_encoder_kwargs_for_generation` of
`transformers.generation.utils.GenerationMixin`, 5.23, and `get_placeholder_mask` of the models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.generate_call import GenerateCall

_PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
}


@dataclass(frozen=True)
class Visual:
    """One image or video of a prompt.

    Attributes:
        modality: "image" or "video".
        index: among those of its modality that `generate` was called with.
        row: of the batch.
        columns: `[n]` int64, of the row's prompt, ascending.
        features: `[n, D]`, as the model merges them with the text's embeddings.
    """

    modality: str
    index: int
    row: int
    columns: Tensor
    features: Tensor


def find_visuals(call: GenerateCall, copies: int = 1) -> list[Visual]:
    """All images, then all videos, of a call.

    Args:
        copies: of each row that `generate` was called with (`num_return_sequences`).

    Raises:
        UnsupportedModelError: features whose number is not that of the prompt's placeholders.
    """
    encoded = call.others.get("mm_encoder_outputs") or {}
    found: list[Visual] = []
    for modality, output in encoded.items():
        features = split_features(output.pooler_output)
        row, column = (call.ids == find_placeholder(call.model, modality)).nonzero().unbind(1)
        counts = [len(f) for f in features]
        if sum(counts) != len(row):
            raise UnsupportedModelError(
                f"visual_tokens: expected a placeholder for each of the {sum(counts)} {modality} "
                f"features, received {len(row)}; use the model's own processor"
            )
        parts = zip(features, row.split(counts), column.split(counts), strict=True)
        firsts, seen = dict[int, int](), dict[int, int]()
        for own, rows, columns in parts:
            place = seen.get(int(rows[0]), 0)
            seen[int(rows[0])] = place + 1
            original, copy = divmod(int(rows[0]), copies)
            if copy == 0:
                firsts.setdefault(original, sum(seen[row] for row in seen if row % copies == 0) - 1)
            index = firsts[original] + place
            found.append(Visual(modality, index, int(rows[0]), columns, own))
    return found


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
    """A seed for each image: of its row of the prompt, and its place among the row's images.

    Args:
        rows: of each image.
    """
    found = list[int]()
    seen = dict[int, int]()
    for row in rows:
        place = seen.get(row, 0)
        seen[row] = place + 1
        found.append((seeds[row] + 0x9E3779B97F4A7C15 * place) % 2**63)
    return found


def split_features(pooled: Any) -> list[Tensor]:
    """Features `[n, D]` of each image from a model's: `[N, n, D]`, or such a list.

    Rows without an image, which some models list, are left out.
    """
    return [features for features in pooled if len(features)]


def flatten_features(pooled: Any) -> Tensor:
    """Features `[sum of n, D]` of all images, in order, from a model's."""
    return pooled.flatten(0, -2) if isinstance(pooled, Tensor) else torch.cat(list(pooled))


def join_features(features: list[Tensor], pooled: Any) -> Any:
    """Features of each image in the form of `pooled`: a list, or one tensor `[sum of n, D]`."""
    return torch.cat(features) if isinstance(pooled, Tensor) else features
