"""The vision towers that are known here: how patches lie in them, and what stands behind them.

A tower is known by the `model_type` of its own configuration. Those with rows have a sequence for
each image, tile or frame, and a table of positions from which a patch takes its own by index. Those
that are packed have one sequence for all, in blocks of patches, with the grids of the images beside
it; positions and bounds of the sequences may be given to them.

Source: the towers of transformers 5.24, and `transformers.vision_utils`, whose tensors packed
towers take as arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Any, Literal

_PARTS = ("vision_tower", "vision_model", "visual")


@dataclass(frozen=True)
class VisionTower:
    """What is known of the towers of a class.

    Attributes:
        patches: "rows" or "packed".
        interpolates: it takes images of other sizes with its `interpolate_pos_encoding`.
        has_windows: some layers attend in windows of the packed sequence.
        has_table: packed patches have a table of positions beside rotary ones.
    """

    patches: Literal["rows", "packed"]
    interpolates: bool = False
    has_windows: bool = False
    has_table: bool = False


UNMERGED = {  # by the model's model_type, why patches are no plain rows
    "qwen2_vl": "packs all images into one sequence and joins patches by 2 x 2 blocks of it",
    "qwen2_5_vl": "attends in windows of a packed sequence and joins patches by 2 x 2 blocks of it",
    "qwen3_vl": "packs all images into one sequence and joins patches by 2 x 2 blocks of it",
    "chameleon": "is a VQGAN, whose tokens are codes of places",
}
TOWERS = {
    "clip_vision_model": VisionTower("rows", interpolates=True),
    "siglip_vision_model": VisionTower("rows", interpolates=True),
    "janus_vision_model": VisionTower("rows", interpolates=True),
    "internvl_vision": VisionTower("rows"),
    "idefics3_vision": VisionTower("rows"),
    "smolvlm_vision": VisionTower("rows"),
    "qwen2_vl_vision": VisionTower("packed"),
    "qwen2_5_vl_vision": VisionTower("packed", has_windows=True),
    "qwen3_vl_vision": VisionTower("packed", has_table=True),
}


@dataclass(frozen=True)
class Joint:
    """A projector behind the tower that makes one feature of a block of patches.

    Attributes:
        part: of the base model.
        unit: patches of a block along each side, from the model's configuration.
        one_size: it takes a grid of one size.
    """

    part: str
    unit: Callable[[Any], int]
    one_size: bool = False


def _pooled(config: Any) -> int:
    vision = config.vision_config
    return int(vision.image_size // vision.patch_size // isqrt(config.mm_tokens_per_image))


JOINTS = {  # by the model's model_type
    "internvl": Joint("multi_modal_projector", lambda config: round(1 / config.downsample_ratio)),
    "idefics3": Joint("connector", lambda config: int(config.scale_factor)),
    "smolvlm": Joint("connector", lambda config: int(config.scale_factor)),
    "gemma3": Joint("multi_modal_projector", _pooled, one_size=True),
}


def find_tower(model: Any) -> Any:
    """The vision tower of a model, or None."""
    found = (getattr(model.base_model, name, None) for name in _PARTS)
    return next((tower for tower in found if tower is not None), None)


def describe_tower(model: Any) -> VisionTower | None:
    """What is known of a model's tower; None where it has none of the table."""
    config = getattr(find_tower(model), "config", None)
    return TOWERS.get(getattr(config, "model_type", ""))


def find_unit(model: Any) -> int:
    """Patches of a feature along each side; 1 where a feature is a patch."""
    tower = describe_tower(model)
    if tower is not None and tower.patches == "packed":
        return int(model.config.vision_config.spatial_merge_size)
    joint = JOINTS.get(model.config.model_type)
    return 1 if joint is None else joint.unit(model.config)


def find_side(tower: Any) -> int:
    """Pixels of a patch along each side."""
    side = tower.config.patch_size
    return side if isinstance(side, int) else int(side[0])
