"""What a reducer may look at between the encoder and the first layer: the features of each image,
their places, what the tower's attention said of them, and their prompt's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmaccel.checks import check_int
from mmaccel.pipelines.hosts.generate_call import GenerateCall
from mmaccel.pipelines.hosts.vision_language.encoder import EncoderCall
from mmaccel.pipelines.hosts.vision_language.towers import describe_features, describe_tower
from mmaccel.pipelines.hosts.vision_language.visuals import Visual, find_placeholders
from mmaccel.reduction.visual_tokens.attention_mass import attention_mass
from mmaccel.reduction.visual_tokens.context import Queries, Text, VisualContext, make_context


def open_context(
    call: GenerateCall,
    encoder: EncoderCall,
    visuals: Sequence[Visual],
    seeds: Sequence[int],
    left: Sequence[tuple[Tensor, Tensor]] | None = None,
) -> VisualContext:
    """The context of a call, a row for each image or video, as are `seeds`; `left` after merges in
    the encoder: `[n]` bool, which features count, and `[n]` float32, how many tokens each stands
    for.
    """
    places = [visual.places for visual in visuals]
    is_image = visuals[0].modality == "image"
    source, group, row, column = (
        pad_sequence([getattr(p, name) for p in places], batch_first=True, padding_value=-1)
        for name in ("source", "group", "row", "column")
    )
    x = pad_sequence([visual.features for visual in visuals], batch_first=True)
    valid = source >= 0  # tokens that end a row say nothing of the image
    size = None
    if left is not None:
        valid &= pad_sequence([kept for kept, _ in left], batch_first=True)
        size = pad_sequence([sizes for _, sizes in left], batch_first=True)
    options: dict[str, Any] = {}
    if bool((row >= 0).any()):
        options = {"row": row, "column": column}
        if is_image and "tiles" in describe_features(call.model).looks:
            grids = [place.tile_grid for place in places]
            options["tile_grid"] = torch.tensor(grids, device=x.device, dtype=torch.int64)
    if encoder.noted and all(place.is_own for place in places):
        options |= _look_at_tower(call.model, encoder, source)

    def text() -> Text:
        """The embeddings of the text of each image's row."""
        is_text = call.mask[:, -call.ids.shape[1] :]
        for placeholder in find_placeholders(call.model):
            is_text = is_text & (call.ids != placeholder)
        states = call.model.get_input_embeddings()(call.ids.where(is_text, 0))
        rows = call.ids.new_tensor([visual.row for visual in visuals])
        return Text(states[rows], is_text[rows])

    return make_context(
        x,
        valid,
        group=group.clamp(min=0),
        groups=None if is_image else "frames",
        size=size,
        seed=torch.tensor(seeds, dtype=torch.int64),
        text=text,
        **options,
    )


def _look_at_tower(model: Any, encoder: EncoderCall, source: Tensor) -> dict[str, Any]:
    """Keys of the tower's tokens and the attention that they receive, for `make_context`; `source`
    `[B, N]` int64, the place of each feature.
    """
    tower = describe_tower(model)
    special = int(tower is not None and tower.has_class_token)

    def noted(name: str, layer: int) -> Tensor:
        """`[R, S, H, D]`."""
        depth = len(encoder.noted)
        hint = "it is one of the encoder's, -1 the last"
        check_int("visual_tokens: layer", layer, -depth, depth - 1, hint=hint)
        return encoder.noted[layer % depth][name]

    def arrange(values: Tensor) -> Tensor:
        """`[B, N, ...]` of `[R, S, ...]`; 0 for features that are no place."""
        at_places = values[:, special:].flatten(0, 1)[source.clamp(min=0)]
        is_place = (source >= 0).view(*source.shape, *[1] * (at_places.ndim - 2))
        return at_places.where(is_place, 0)

    def attention(layer: int, queries: Queries, per_head: bool) -> Tensor:
        """`[B, N]` or `[B, H, N]`; each tile is a sequence of its own to the tower."""
        q, k = noted("q", layer).transpose(1, 2), noted("k", layer).transpose(1, 2)
        mass = attention_mass(
            q[:, :, :1] if queries == "cls" else q,
            k,
            torch.arange(k.shape[2], device=k.device).expand(len(k), -1),
            scale=q.shape[-1] ** -0.5,
            per_head=True,
        )  # [R, H, S]
        received = arrange(mass.transpose(1, 2)).transpose(1, 2)  # [B, H, N]
        return received if per_head else received.sum(1)

    return {
        "keys": lambda layer: arrange(noted("k", layer)),
        "attention": attention,
        "queries": ("cls", "all") if special else ("all",),
    }
