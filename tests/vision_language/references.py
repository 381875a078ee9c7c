"""What the references of the encoder's stages share.

Each makes the features of all places by hand: by a tower that hides patches, that sees smaller
images, or that is a stub. The model answers to these, and a mask hides from it all but one of the
features for which one place stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.hosts.vision_language.places import find_places
from tests.fixtures.tiny_vlms import IMAGE, VIDEO, EncoderOutput
from tests.vision_language.runs import GREEDY, position_ids

PACKED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
WITH_CLASS = ("llava", "llava_next", "internvl")
OF_MODALITY = {
    "image": ("pixel_values", "image_sizes", "image_grid_thw", "pixel_attention_mask",
              "vision_feature_layer"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}  # fmt: skip


def unit_of(name: str) -> int:
    """Patches of a feature along each side, in the tiny models."""
    return 2 if name in (*PACKED, "internvl", "idefics3", "smolvlm", "gemma3") else 1


def rows_of_tower(name: str, inputs: dict[str, Any]) -> list[tuple[Tensor, Any, int]]:
    """Pixels, patches that are real, and the row of the prompt, of each row of a tower."""
    if "pixel_values_videos" in inputs:
        videos = inputs["pixel_values_videos"]
        return [(frame, None, row) for row, own in enumerate(videos) for frame in own]
    pixels, found = inputs["pixel_values"], []
    per_row = [2, 0, 1][: len(inputs["input_ids"])]
    prompt = [row for row, n in enumerate(per_row) for _ in range(n)]
    if name in ("llava_next", "llava_onevision"):
        for row, tiles, size in zip(prompt, pixels, inputs["image_sizes"].tolist()):
            n = {(16, 32): 3, (32, 32): 5, (20, 9): 3}[tuple(size)]
            found += [(tile, None, row) for tile in tiles[:n]]
    elif name in ("idefics3", "smolvlm"):
        for row, images in enumerate(pixels):
            for k in range(per_row[row]):
                real = torch.ones(4, 4, dtype=torch.bool)
                if "pixel_attention_mask" in inputs:
                    real = inputs["pixel_attention_mask"][row, k, ::4, ::4].bool()
                found.append((images[k], real, row))
    else:
        found = [(image, None, row) for image, row in zip(pixels, prompt, strict=True)]
    return found


def spread_index(name: str, to: Sequence[int], width: int) -> list[int]:
    """For each token of a row the one of the tower's output whose state it gets.

    Args:
        to: for each of a row's features one of a grid with `width` features a line.
    """
    unit, special = unit_of(name), int(name in WITH_CLASS)
    found = list(range(special))
    for patch in range(16):
        y, x = divmod(patch, 4)
        row, column = divmod(to[y // unit * (4 // unit) + x // unit], width)
        place = (row * unit + y % unit) * width * unit + column * unit + x % unit
        found.append(special + place)
    return found


@contextmanager
def spreading(tower: Any, index: Sequence[Sequence[int]]) -> Iterator[None]:
    """Inside the block a tower gives out other tokens of its rows: `index`, for each row."""
    at = torch.tensor(index)[..., None]

    def take(states: Tensor) -> Tensor:
        return states.gather(1, at.expand(len(states), -1, states.shape[-1]))

    def spread(_tower: Any, _args: Any, output: Any) -> Any:
        output.last_hidden_state = take(output.last_hidden_state)
        if getattr(output, "hidden_states", None):
            output.hidden_states = tuple(h if h is None else take(h) for h in output.hidden_states)
        return output

    hook = tower.register_forward_hook(spread)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def encode(model: Any, inputs: dict[str, Any], modality: str = "image", **options: Any) -> Any:
    """What the encoder makes of the images, or videos, of a call."""
    given = {key: inputs[key] for key in OF_MODALITY[modality] if key in inputs}
    function = getattr(model.base_model, f"get_{modality}_features")
    return function(**given, **options, return_dict=True)


def at_places(output: Any, index: Sequence[Any]) -> EncoderOutput:
    """A packed tower's features at the places `index` of each image."""

    def take(features: Any) -> list[Tensor]:
        return [torch.cat(list(features))[own] for own in index]

    made = EncoderOutput(pooler_output=take(output.pooler_output))
    deep = getattr(output, "deepstack_features", None)
    if deep is not None:
        made.deepstack_features = [take(layer) for layer in deep]
    return made


def answer_to_features(
    model: Any,
    name: str,
    inputs: dict[str, Any],
    made: Any,
    stands: Sequence[int] | None,
    modality: str = "image",
) -> tuple[Tensor, int]:
    """The model's own greedy tokens for features at all places, and how many of them it sees.

    Of the features for which one place stands it sees that place's own or, where that was cut off,
    the first; ends of rows go where any feature of the image does.

    Args:
        stands: for each place of all images the one that stands for it; None: all features stay.
    """
    pooled = [features for features in made.pooler_output if len(features)]
    masks = []
    for place in find_places(model, modality, [len(f) for f in pooled], inputs):
        groups: dict[int, list[int]] = {}
        source = place.source.tolist()
        for k, own in enumerate(source):
            if own >= 0:
                groups.setdefault(own if stands is None else stands[own], []).append(k)
        is_whole = stands is None or not place.is_own or all(len(g) == 1 for g in groups.values())
        stays = [is_whole] * len(source)
        for own, members in groups.items():
            best = [k for k in members if source[k] == own] or members
            stays[best[0]] = True
        masks.append(torch.tensor(stays))
    kept = inputs["attention_mask"].clone()
    kept[inputs["input_ids"] == (IMAGE if modality == "image" else VIDEO)] = torch.cat(masks).long()
    given = {k: v for k, v in inputs.items() if not k.startswith("pixel")}
    given |= {"mm_encoder_outputs": {modality: made}, "attention_mask": kept}
    given["position_ids"] = position_ids(name, model, inputs)
    return model.generate(**given, **GREEDY), int(torch.cat(masks).sum())
