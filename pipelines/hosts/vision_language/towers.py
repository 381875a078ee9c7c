"""The vision towers and models that are known here: how patches lie in a tower, and what a model
makes of them. All that differs by class is a row of one of the two tables.

A tower is known by its own `model_type`. Those with rows have a sequence for each image, tile or
frame, and a table of positions. Packed ones have one sequence in blocks of patches, with the
images' grids; positions and bounds may be given to them.

Source: the towers of transformers 5.24, and the arguments of packed ones in its `vision_utils`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Any, Literal

_PARTS = ("vision_tower", "vision_model", "visual")


@dataclass(frozen=True)
class VisionTower:
    """What is known of the towers of a class."""

    patches: Literal["rows", "packed"] = "rows"
    has_class_token: bool = False  # in front of the patches of a row
    interpolates: bool = False  # takes other sizes of images, by `interpolate_pos_encoding`
    has_windows: bool = False  # some layers attend in windows of the packed sequence
    has_table: bool = False  # packed patches have a table of positions beside rotary ones


TOWERS = {
    "clip_vision_model": VisionTower(has_class_token=True, interpolates=True),
    "siglip_vision_model": VisionTower(interpolates=True),
    "janus_vision_model": VisionTower(interpolates=True),
    "internvl_vision": VisionTower(has_class_token=True),
    "idefics3_vision": VisionTower(),
    "smolvlm_vision": VisionTower(),
    "qwen2_vl_vision": VisionTower("packed"),
    "qwen2_5_vl_vision": VisionTower("packed", has_windows=True),
    "qwen3_vl_vision": VisionTower("packed", has_table=True),
}


@dataclass(frozen=True)
class Features:
    """How a model makes features of an image, of what its tower gives out."""

    looks: frozenset[str] = frozenset()  # of methods at the exit of the encoder, beside text
    # "tokens": a feature is a token of the tower; "tiles": so it is, of tiles packed side by side;
    # "grid": the inputs have the grid of the features; "blocks": it is made of several tokens
    layout: Literal["tokens", "tiles", "grid", "blocks"] = "blocks"
    unit: Callable[[Any], int] = lambda config: 1  # patches of a feature along each side
    unmerged: str = ""  # why patches are no plain rows

    @property
    def are_tokens(self) -> bool:
        return self.layout in ("tokens", "tiles")


def _merged(config: Any) -> int:
    return int(config.vision_config.spatial_merge_size)


def _shuffled(config: Any) -> int:
    return int(config.scale_factor)


def _pooled(config: Any) -> int:
    vision = config.vision_config
    return int(vision.image_size // vision.patch_size // isqrt(config.mm_tokens_per_image))


_RECORDED = frozenset({"grid", "keys", "all_attention"})
_ON_A_GRID = frozenset({"grid", "frames"})
_PACKED = "packs all images into one sequence and joins patches by 2 x 2 blocks of it"
_IN_WINDOWS = "attends in windows of a packed sequence and joins patches by 2 x 2 blocks of it"
FEATURES = {  # by the model's model_type
    "llava": Features(_RECORDED, "tokens"),
    "llava_next": Features(_RECORDED | {"tiles"}, "tiles"),
    "llava_onevision": Features(_RECORDED | {"tiles", "frames"}, "tiles"),
    "janus": Features(layout="tokens"),
    "qwen2_vl": Features(_ON_A_GRID, "grid", unit=_merged, unmerged=_PACKED),
    "qwen2_5_vl": Features(_ON_A_GRID, "grid", unit=_merged, unmerged=_IN_WINDOWS),
    "qwen3_vl": Features(_ON_A_GRID, "grid", unit=_merged, unmerged=_PACKED),
    "internvl": Features(unit=lambda config: round(1 / config.downsample_ratio)),
    "idefics3": Features(unit=_shuffled),
    "smolvlm": Features(unit=_shuffled),
    "gemma3": Features(unit=_pooled),
    "chameleon": Features(unmerged="is a VQGAN, whose tokens are codes of places"),
}


def find_tower(model: Any) -> Any:
    parts = (getattr(model.base_model, name, None) for name in _PARTS)
    return next((tower for tower in parts if tower is not None), None)


def describe_tower(model: Any) -> VisionTower | None:
    """What is known of a model's tower; None where it has none of the table."""
    config = getattr(find_tower(model), "config", None)
    return TOWERS.get(getattr(config, "model_type", ""))


def describe_features(model: Any) -> Features:
    return FEATURES.get(model.config.model_type, Features(unmerged="is of a kind not known here"))


def find_side(tower: Any) -> int:
    """Pixels of a patch along each side."""
    side = tower.config.patch_size
    return side if isinstance(side, int) else int(side[0])


def find_attentions(tower: Any) -> list[Any]:
    """The attention modules of a tower's layers, in order."""
    modules = [m for m in tower.modules() if hasattr(m, "q_proj") and hasattr(m, "k_proj")]
    return [m for m in modules if hasattr(m, "num_heads")]
