"""Which token of the tower a feature is, and the attention that it received there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.pipelines.hosts.vision_language.encoder import EncoderCall
from mmaccel.pipelines.hosts.vision_language.exit_context import open_context
from mmaccel.pipelines.hosts.vision_language.places import find_places
from mmaccel.pipelines.hosts.vision_language.visuals import Visual
from tests.fixtures.tiny_vlms import build_vlm, draw_images
from tests.vision_language.runs import reduces

pytestmark = reduces

SIDE = 4  # of a tile, in tokens


@dataclass(frozen=True)
class Call:
    """What the context of a call reads of it, for methods that read no text."""

    model: Any


@cache
def build(name: str) -> Any:
    """A model whose tower gives out its attention maps."""
    model = build_vlm(name)
    model.base_model.vision_tower.set_attn_implementation("eager")
    return model


def encode(name: str, model: Any, n: int) -> tuple[list[Visual], dict[str, Any], Any, Any]:
    """Images, the inputs, the record of the tower, and the tower's own attention maps."""
    inputs = draw_images(name, model, (n,)).inputs
    with torch.no_grad(), EncoderCall(model, inputs, records=True) as record:
        made = model.base_model.get_image_features(
            **inputs, output_attentions=True, return_dict=True
        )
    places = find_places(model, "image", [len(f) for f in made.pooler_output], inputs)
    visuals = [
        Visual("image", k, 0, torch.arange(len(features)), features, places[k])
        for k, features in enumerate(made.pooler_output)
    ]
    return visuals, inputs, record, made.attentions


def tower_tokens(name: str, model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """Projected tokens `[tiles * 16, D]` of each image, by hand."""
    pixels = inputs["pixel_values"]
    has_class = name != "llava_onevision"
    found = []
    for k in range(len(pixels)):
        tiles = pixels[k][: _count_tiles(inputs, k)] if pixels.ndim == 5 else pixels[k : k + 1]
        with torch.no_grad():
            hidden = model.base_model.vision_tower(tiles, output_hidden_states=True).hidden_states
            layer = model.config.vision_feature_layer
            states = hidden[layer][:, 1:] if has_class else hidden[layer]
            found.append(model.base_model.multi_modal_projector(states).flatten(0, 1))
    return found


def _count_tiles(inputs: dict[str, Any], k: int) -> int:
    return {(16, 32): 3, (32, 32): 5, (20, 9): 3}[tuple(inputs["image_sizes"][k].tolist())]


@pytest.mark.parametrize("name", ["llava", "llava_next", "llava_onevision"])
def test_a_feature_is_the_tower_token_that_is_named(name: str) -> None:
    model = build(name)
    visuals, inputs, _, _ = encode(name, model, 3)
    first = 0
    by_hand = tower_tokens(name, model, inputs)
    all_tokens = torch.cat(by_hand)
    for visual, tokens in zip(visuals, by_hand, strict=True):
        place = visual.places
        is_token = place.source >= 0
        torch.testing.assert_close(visual.features[is_token], all_tokens[place.source[is_token]])
        if name != "llava":
            end = model.base_model.image_newline.expand(int((~is_token).sum()), -1)
            torch.testing.assert_close(visual.features[~is_token], end)
        source = place.source[is_token] - first
        first += len(tokens)
        assert place.group[is_token].tolist() == (source // SIDE**2).tolist()
        assert place.row[is_token].tolist() == (source % SIDE**2 // SIDE).tolist()
        assert place.column[is_token].tolist() == (source % SIDE).tolist()
        assert int(place.group.max()) < place.tiles == len(tokens) // SIDE**2


@pytest.mark.parametrize("name", ["llava", "llava_next", "llava_onevision"])
@pytest.mark.parametrize("layer", [0, -2])
def test_attention_is_that_of_the_towers_own_maps(name: str, layer: int) -> None:
    model = build(name)
    visuals, inputs, record, maps = encode(name, model, 2)
    context = open_context(Call(model), record, visuals, [0, 0])
    places = [visual.places for visual in visuals]
    own = maps[layer]  # [tiles, H, S, S]
    has_class = name != "llava_onevision"
    for row, place in enumerate(places):
        is_token = place.source >= 0
        wanted = {"all": own.sum(2)} | ({"cls": own[:, :, 0]} if has_class else {})
        for queries, mass in wanted.items():
            mass = mass[:, :, 1:] if has_class else mass
            flat = mass.transpose(0, 1).flatten(1)[:, place.source[is_token]]  # [H, n]
            found = context.attention(layer, queries, per_head=True)[row]
            found = found[:, : len(is_token)][:, is_token]
            torch.testing.assert_close(found, flat, rtol=1e-4, atol=1e-6)
    counts = [int((place.source >= 0).sum()) for place in places]
    assert context.valid.sum(1).tolist() == counts
    keys, noted = context.keys(1), record.noted[1]["k"][:, int(has_class) :].flatten(0, 1)
    for row, place in enumerate(places):
        is_token = place.source >= 0
        assert keys[row][: len(is_token)][is_token].equal(noted[place.source[is_token]])
