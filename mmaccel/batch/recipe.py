"""Everything an image depends on: what two runs must share for one to go on with the other's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmaccel.batch.item import Item
from mmaccel.batch.setup import Setup
from mmaccel.canvas_contracts import kind_of
from mmaccel.catalog import make_policy
from mmaccel.loading import parse_size, pick_name
from mmaccel.outputs.image_files import plainly, short_hash
from mmaccel.outputs.machine import versions
from mmaccel.pipelines.text_to_image.model import choose_params, encode_prompts, spread_negatives
from mmaccel.pipelines.text_to_image.pipeline import GenerationSettings
from mmaccel.results import exactness_in

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image.pipeline import TextToImage

FILTERS = ("guidance_scale", "temperature", "top_k", "top_p", "min_p")


def make_recipe(setup: Setup, item: Item, pipe: TextToImage) -> GenerationSettings:
    """What a row asks for, over what the command line asks for.

    Raises:
        OptionError: something the model or the policy does not take.
    """
    row = item.row
    own = {name: value for name, value in row.params.items() if name in FILTERS}
    fields = {name: value for name, value in row.params.items() if name not in FILTERS}
    params = choose_params(pipe.image_model.params, **{**setup.params, **own})
    kind = kind_of(pipe.model)
    usual, options = pick_name(setup.policy, {**setup.options}, kind)
    name = usual if row.policy is None else row.policy
    name, options = pick_name(name, (options if name == usual else {}) | fields, kind)
    encode_prompts(pipe.image_model, [row.prompt], [negative_of(setup, item)], params)
    return GenerationSettings(name, make_policy(name, **options), params)


def negative_of(setup: Setup, item: Item) -> str | None:
    """What an item is guided away from; None is the model's own."""
    said = setup.negative if item.row.negative is None else item.row.negative
    return spread_negatives(said, 1)[0]


def describe(setup: Setup, item: Item, recipe: GenerationSettings, weights: str) -> dict[str, Any]:
    """What an image is made from, ready for JSON; nothing in it changes from run to run.

    Args:
        weights: content hash of the model.
    """
    size = parse_size(setup.size) if item.row.size is None else item.row.size
    negative = negative_of(setup, item)
    return {
        "id": item.row.id,
        "k": item.k,
        "prompt": item.row.prompt,
        **({} if negative is None else {"negative": negative}),
        "seed": item.seed,
        "model": setup.model,
        "weights": weights,
        "size": None if size is None else list(size),
        "dtype": setup.dtype,
        "device": setup.device.split(":")[0],
        "policy": recipe.name,
        "policy_options": {name: plainly(v) for name, v in vars(recipe.policy).items()},
        **{name: getattr(recipe.params, name) for name in FILTERS},
        "exactness": exactness_in(recipe.policy.exactness, setup.dtype),
        "versions": versions(),
    }


def fingerprint(facts: dict[str, Any]) -> str:
    """Eight digits that differ where two descriptions would give different images."""
    apart = ("model", "versions", "exactness", "device")  # as long as the weights are the same
    return short_hash({name: value for name, value in facts.items() if name not in apart})
