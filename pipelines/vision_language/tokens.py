"""Where visual tokens stand in an image, and what its encoder said of them: the model's part of a
reducer's context.

The features that a model puts into a prompt are tokens of a tower, packed: tiles are laid side by
side, padding is cut off, ends of rows get a token of their own. Which tower token a feature is, is
found by packing their indices with the model's own `pack_image_features`.

Source: `get_image_features` and `pack_image_features` of these models in transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmaccel.checks import check_int
from mmaccel.pipelines.generate_call import GenerateCall
from mmaccel.pipelines.vision_language.visuals import Visual, find_placeholders
from mmaccel.reduction.visual_tokens.attention_mass import attention_mass
from mmaccel.reduction.visual_tokens.context import Queries, Text, VisualContext, make_context

_TILED = {"llava_next", "llava_onevision"}
_RECORDED = {"llava", *_TILED}
_ONE_TO_ONE = {"janus", *_RECORDED}  # a feature is a token of the tower, no mean of several
_WITH_CLASS_TOKEN = {"clip_vision_model", "internvl_vision"}
_GRIDS = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl"}


@dataclass
class EncoderRecord:
    """Queries and keys of a tower's layers, from its last call.

    Attributes:
        layers: (queries, keys) of each layer, `[tiles, S, H * D]`; S counts the class token.
        heads: H.
    """

    heads: int
    layers: list[dict[str, Tensor]] = field(default_factory=list)


@contextmanager
def recorded_encoder(model: Any, wanted: bool) -> Iterator[EncoderRecord | None]:
    """Record what the attention of a model's tower reads, inside the block.

    Nothing else of the tower changes: it keeps its fast attention, and no map is made.

    Args:
        wanted: whether a method asks for it; otherwise the block is an empty one.
    """
    tower = getattr(model.base_model, "vision_tower", None)
    attentions = [] if tower is None else find_attentions(tower)
    if not wanted or not attentions:
        yield None
        return
    record = EncoderRecord(attentions[0].num_heads, [{} for _ in attentions])
    hooks = []
    for attention, layer in zip(attentions, record.layers, strict=True):
        hooks += listen(attention, layer.__setitem__)
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()


def find_attentions(tower: Any) -> list[Any]:
    """The attention modules of a tower's layers, in order; of those with `q_proj` and `k_proj`."""
    modules = [m for m in tower.modules() if hasattr(m, "q_proj") and hasattr(m, "k_proj")]
    return [m for m in modules if hasattr(m, "num_heads")]


def listen(attention: Any, keep: Callable[[str, Tensor], Any]) -> list[Any]:
    """Hand on the queries ("q") and keys ("k") that an attention module makes; torch's handles."""
    hooks = []
    for name in ("q", "k"):
        part = getattr(attention, f"{name}_norm", None)
        part = getattr(attention, f"{name}_proj") if part is None else part
        hook = partial(_hand_on, keep, name)
        hooks.append(part.register_forward_hook(hook))
    return hooks


def _hand_on(keep: Callable[[str, Tensor], Any], name: str, _part: Any, _: Any, made: Any) -> None:
    keep(name, made.detach())


def has_class_token(model: Any) -> bool:
    """Whether the tower of a model has a class token."""
    config = getattr(model.config, "vision_config", None)
    return getattr(config, "model_type", None) in _WITH_CLASS_TOKEN


def has_tower_tokens(model: Any) -> bool:
    """Whether a feature of an image is a token of the tower, no mean of several."""
    return model.config.model_type in _ONE_TO_ONE


def offered(model: Any) -> frozenset[str]:
    """What methods at the exit of the encoder may look at."""
    kind = model.config.model_type
    found = {"text"}
    if kind in _RECORDED:
        found |= {"grid", "keys", "all_attention"} | ({"tiles"} if kind in _TILED else set())
        found |= {"cls_attention"} if has_class_token(model) else set()
        found |= {"frames"} if kind == "llava_onevision" else set()
    elif kind in _GRIDS:
        found |= {"grid", "frames"}
    return frozenset(found)


def find_missing(model: Any, modality: str, inputs: Mapping[str, Any]) -> str | None:
    """The argument that says where features stand and is not given; None where none is missing.

    Args:
        modality: "image" or "video".
        inputs: what `generate` was called with.
    """
    kind = model.config.model_type
    wanted = None
    if kind in _GRIDS:
        wanted = f"{modality}_grid_thw"
    elif kind in _TILED and modality == "image":
        wanted = "image_sizes"
    elif kind == "llava_onevision":
        wanted = "pixel_values_videos"
    return None if wanted is None or inputs.get(wanted) is not None else wanted


@dataclass(frozen=True)
class Places:
    """Where the features of one image stand.

    Attributes:
        source: `[n]` int64, the tower token of each, tiles one after the other, without the class
            token; -1 for tokens that end a row or a video.
        group, row, column: `[n]` int64, tile or frame, and place in its grid; -1 where unknown.
        tile_grid: rows and columns of tiles.
        tiles: tiles of this image, the overview included; 0 where a feature is no tower token.
    """

    source: Tensor
    group: Tensor
    row: Tensor
    column: Tensor
    tile_grid: tuple[int, int] = (0, 0)
    tiles: int = 1


def find_places(model: Any, visuals: Sequence[Visual], inputs: Mapping[str, Any]) -> list[Places]:
    """Where the features of images stand.

    Args:
        visuals: images, or videos, of one call.
        inputs: what `generate` was called with: `image_sizes`, `image_grid_thw`, …
    """
    return [_find_places(model, visual, inputs) for visual in visuals]


def _find_places(model: Any, visual: Visual, inputs: Mapping[str, Any]) -> Places:
    kind = model.config.model_type
    n = len(visual.features)
    index = torch.arange(n, device=visual.features.device)
    if kind in _GRIDS:
        thw = inputs[f"{visual.modality}_grid_thw"][visual.index].tolist()
        merge = model.config.vision_config.spatial_merge_size
        return _lay(index, (thw[1] // merge, thw[2] // merge), 0)
    is_image = visual.modality == "image"
    if kind in _TILED and is_image and _find_tiled(model, inputs)[visual.index]:
        return _find_tiles(model, visual, inputs["image_sizes"][visual.index])
    n_tokens = n - 1 if kind in _TILED else n  # one ends the row of one tile, or the video
    side = isqrt(n_tokens if is_image else n_tokens // inputs["pixel_values_videos"].shape[1])
    if kind not in _ONE_TO_ONE or (is_image and side * side != n_tokens):
        return _lay(index, (0, 0), 0)
    return _lay(index.where(index < n_tokens, -1), (side, side), int(is_image))


def _lay(
    source: Tensor, grid: tuple[int, int], tiles: int, tile_grid: tuple[int, int] = (0, 0)
) -> Places:
    """Places in grids h x w, one behind the other; (0, 0) where that is not known."""
    height, width = grid
    unknown = torch.full_like(source, -1)
    if not width:
        return Places(source, unknown + 1, unknown, unknown, tile_grid, tiles)
    is_token = source >= 0
    inside = source % (height * width)
    return Places(
        source,
        (source // (height * width)).where(is_token, 0),
        (inside // width).where(is_token, -1),
        (inside % width).where(is_token, -1),
        tile_grid,
        tiles,
    )


def count_tokens(
    model: Any, inputs: Mapping[str, Any], modality: str, n: int, total: int
) -> list[tuple[int, int]]:
    """For each image or video of a call, before they are encoded: its rows of the tower (tiles,
    frames), and its features.

    Args:
        model, inputs: as in `find_places`.
        modality: "image" or "video".
        n: rows of the tower.
        total: placeholders of the prompt.
    """
    if modality == "video":
        videos, frames = inputs["pixel_values_videos"].shape[:2]
        return [(frames, total // videos)] * videos
    if model.config.model_type not in _TILED:
        return [(1, total // n)] * n
    vision = model.config.vision_config
    per_tile = (vision.image_size // vision.patch_size) ** 2
    found = []
    for size, tiled in zip(inputs["image_sizes"], _find_tiled(model, inputs), strict=True):
        packed, (rows, columns) = _pack_indices(model, size, torch.device("cpu"))
        found.append((1 + rows * columns, len(packed)) if tiled else (1, per_tile + 1))
    return found


def _find_tiled(model: Any, inputs: Mapping[str, Any]) -> list[bool]:
    """Whether each image is cut into tiles: LLaVA-OneVision cuts those that are alone in a row."""
    per_row = inputs.get("batch_num_images")
    if per_row is None or model.config.model_type != "llava_onevision":
        return [True] * len(inputs["image_sizes"])
    return [int(count) == 1 for count in per_row for _ in range(int(count))]


def _pack_indices(model: Any, size: Any, device: torch.device) -> tuple[Tensor, tuple[int, int]]:
    """Indices `[n]` float64 of the tokens of an overview and of tiles, packed as features of an
    image of a size, -1 for tokens that end a row; and rows and columns of tiles.
    """
    vision = model.config.vision_config
    side = vision.image_size // vision.patch_size
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

    rows, columns = get_anyres_image_grid_shape(
        torch.as_tensor(size), model.config.image_grid_pinpoints, vision.image_size
    )
    tiles = 1 + rows * columns
    indices = torch.arange(tiles * side * side, dtype=torch.float64, device=device)
    given: dict[str, Any] = {
        "image_features": [indices.view(tiles, side * side, 1)],
        "image_sizes": torch.as_tensor(size)[None],
        "image_newline": indices.new_full((1,), -1.0),
    }
    if model.config.model_type == "llava_next":
        given["vision_feature_select_strategy"] = "default"
    return model.base_model.pack_image_features(**given)[0][0][:, 0], (rows, columns)


def _find_tiles(model: Any, visual: Visual, size: Any) -> Places:
    """The tokens of an overview and of tiles, by packing their indices as features."""
    vision = model.config.vision_config
    side = vision.image_size // vision.patch_size
    packed, (rows, columns) = _pack_indices(model, size, visual.features.device)
    source = packed.round().long()
    if len(source) != len(visual.features) or not torch.equal(source.double(), packed):
        # features that were resized after the tower: means of several tokens
        return _lay(torch.arange(len(visual.features), device=packed.device), (0, 0), 0)
    return _lay(source, (side, side), 1 + rows * columns, (rows, columns))


def open_context(
    model: Any,
    visuals: Sequence[Visual],
    inputs: Mapping[str, Any],
    seeds: Sequence[int],
    record: EncoderRecord | None,
    left: Sequence[tuple[Tensor, Tensor]] | None = None,
    text: Callable[[], Text] | None = None,
) -> VisualContext:
    """What a reducer may look at between the encoder and the first layer; a row for each image.

    Tokens that end a row of an image are not among its tokens: they say nothing of it.

    Args:
        model, inputs: as in `find_places`.
        visuals: images, or videos, of one call.
        seeds: one for each.
        record: of the tower, where it was recorded.
        left: of each image, after merges in the encoder: `[n]` bool, which features count, and
            `[n]` float32, how many tokens each stands for.
        text: of each image's row.
    """
    places = find_places(model, visuals, inputs)
    stack = {
        name: pad_sequence(
            [getattr(place, name) for place in places], batch_first=True, padding_value=-1
        )
        for name in ("source", "group", "row", "column")
    }
    x = pad_sequence([visual.features for visual in visuals], batch_first=True)
    lengths = torch.tensor(
        [len(visual.features) for visual in visuals], device=x.device, dtype=torch.int64
    )
    valid = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    is_tiled = model.config.model_type in _TILED and visuals[0].modality == "image"
    valid &= stack["source"] >= 0
    size = None
    if left is not None:
        valid &= pad_sequence([kept for kept, _ in left], batch_first=True)
        size = pad_sequence([sizes for _, sizes in left], batch_first=True)
    is_video = visuals[0].modality == "video"
    has_grid = bool((stack["row"] >= 0).any())
    options: dict[str, Any] = {}
    if record is not None and all(place.tiles for place in places):
        order = [visual.index for visual in visuals]
        tower = TowerTokens(record, places, order, stack["source"], has_class_token(model))
        options = {"keys": tower.keys, "attention": tower.attention, "queries": tower.queries}
    if is_tiled and has_grid:
        options["tile_grid"] = torch.tensor(
            [p.tile_grid for p in places], device=x.device, dtype=torch.int64
        )
    return make_context(
        x,
        valid,
        group=stack["group"].clamp(min=0),
        groups="frames" if is_video else "tiles" if is_tiled else None,
        row=stack["row"] if has_grid else None,
        column=stack["column"] if has_grid else None,
        size=size,
        seed=torch.tensor(seeds, dtype=torch.int64),
        text=text,
        **options,
    )


def read_text(call: GenerateCall, visuals: Sequence[Visual]) -> Text:
    """The embeddings of the text of each image's row.

    Args:
        call: whose prompt has the images.
        visuals: images, or videos, of it.
    """
    ids = call.ids
    rows = ids.new_tensor([visual.row for visual in visuals])
    is_text = call.mask[:, -ids.shape[1] :]
    for placeholder in find_placeholders(call.model):
        is_text = is_text & (ids != placeholder)
    embed = call.model.get_input_embeddings()
    return Text(embed(ids.where(is_text, 0))[rows], is_text[rows])


@dataclass(frozen=True)
class TowerTokens:
    """Keys of a tower's tokens and the attention that they receive, in the order of the features.

    Args:
        record: of the tower's call.
        places: of each image.
        order: which image of the record each is.
        source: `[B, N]` int64, tower token of each feature in its image.
        has_class_token: whether token 0 of each tile is one.
    """

    record: EncoderRecord
    places: Sequence[Places]
    order: Sequence[int]
    source: Tensor
    has_class_token: bool

    @property
    def queries(self) -> tuple[Queries, ...]:
        """Whose attention there is."""
        return ("cls", "all") if self.has_class_token else ("all",)

    def keys(self, layer: int) -> Tensor:
        """`[B, N, H, D]`; see `VisualContext.keys`."""
        return self._arrange(self._split(layer, "k").transpose(1, 2))

    def attention(self, layer: int, queries: Queries, per_head: bool) -> Tensor:
        """`[B, N]` or `[B, H, N]`; see `VisualContext.attention`.

        Each tile is a sequence of its own to the tower.
        """
        q, k = self._split(layer, "q"), self._split(layer, "k")  # [tiles, H, S, D]
        mass = attention_mass(
            q[:, :, :1] if queries == "cls" else q,
            k,
            torch.arange(k.shape[2], device=k.device).expand(len(k), -1),
            scale=q.shape[-1] ** -0.5,
            per_head=True,
        )  # [tiles, H, S]
        found = self._arrange(mass.transpose(1, 2)).transpose(1, 2)  # [B, H, N]
        return found if per_head else found.sum(1)

    def _split(self, layer: int, name: str) -> Tensor:
        """`[tiles, H, S, D]` of the queries or keys of a layer."""
        layers = self.record.layers
        hint = "it is one of the encoder's, -1 the last"
        check_int("visual_tokens: layer", layer, -len(layers), len(layers) - 1, hint=hint)
        values = layers[layer][name]
        return values.unflatten(-1, (self.record.heads, -1)).transpose(1, 2)

    def _arrange(self, values: Tensor) -> Tensor:
        """`[B, N, ...]` from `[tiles, S, ...]`; 0 for tokens that end a row and padding."""
        values = values[:, 1:] if self.has_class_token else values
        tiles = dict(zip(self.order, (place.tiles for place in self.places), strict=True))
        parts = values.split([tiles[index] for index in sorted(tiles)])
        flat = pad_sequence([parts[k].flatten(0, 1) for k in self.order], batch_first=True)
        index = self.source.clamp(min=0).view(*self.source.shape, *[1] * (flat.ndim - 2))
        found = flat.gather(1, index.expand(*self.source.shape, *flat.shape[2:]))
        return found.where((self.source >= 0).view(index.shape), 0)
