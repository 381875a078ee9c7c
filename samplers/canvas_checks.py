"""What a canvas run refuses before its first pass."""

from __future__ import annotations

from typing import Any

from mmaccel.canvas_contracts import Denoiser
from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError, ShapeError, UnsupportedModelError
from mmaccel.samplers.cache_plan import CachePlan
from mmaccel.samplers.canvas_live import takes_any_rows
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise


def check_run(
    model: Denoiser,
    prompt: Prompt,
    length: int,
    filters: Filters,
    noise: Noise,
    block: int | None,
    cache: CachePlan,
    layout: str,
) -> None:
    """Refuse what cannot be right.

    Raises:
        OptionError: no model of masked tokens, no slots, more than the model has positions for,
            blocks that do not divide them, places on a model that keeps something for its rows, a
            mask token in the prompt, a processor, a block-causal cache on a model that is none, or
            guidance whose branches begin their blocks elsewhere.
        ShapeError: noise for another batch.
        UnsupportedModelError: a cache on a model that keeps nothing.
    """
    check_model(model)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise OptionError(f"length: expected at least 1 slot, received {length!r}; ask for more")
    if noise.seeds.shape[0] != prompt.batch:
        raise ShapeError(
            f"noise: expected {prompt.batch} rows, received {noise.seeds.shape[0]}; "
            "make it for this batch"
        )
    if prompt.places is not None and not takes_any_rows(model):
        raise OptionError(
            f"places: expected none for a {type(model).__name__}, which keeps something for each "
            f"row of the prompt, received {prompt.places!r}; decode batch by batch"
        )
    if filters.processor is not None:
        raise OptionError(
            "filters: expected no processor, received one; a canvas has no prefix that it could "
            "look at, use a layout for what may stand at a slot"
        )
    filters.check_branches(prompt.branches)
    _check_positions(getattr(model, "max_positions", None), prompt, length)
    _check_mask(model.mask_token, prompt)
    _check_blocks(model, prompt, length, block)
    if (cache.keeps or layout == "entries") and not model.has_store:
        reason = getattr(model, "store_reason", "")
        way = 'layout="rows", or RevisedParallel with revise="edit" or "redo"'
        way = 'cache="none"' if cache.keeps else way
        raise UnsupportedModelError(
            f"cache: expected a model whose keys and values can be kept, for cache "
            f"{cache.kind!r} and layout {layout!r}, received a {type(model).__name__} that runs "
            f"over everything; choose {way}{reason and f' ({reason})'}"
        )
    if cache.kind == "block" and model.block is None:
        raise OptionError(
            "cache: expected a block-causal model for kind 'block', received one whose tokens "
            'look at everything; choose "none" (exact), "prefix" or "dual"'
        )
    if cache.kind == "block" and block not in (None, model.block):
        raise OptionError(
            f"block: expected the model's own {model.block} with a block-causal cache, received "
            f"{block}; leave it out"
        )


def check_model(model: Any) -> None:
    """Raises OptionError for a model that decodes token after token."""
    if not hasattr(model, "has_store"):
        raise OptionError(
            f"policy: expected one that decodes token after token for a {type(model).__name__}, "
            "received one that fills a canvas; choose one such as Jacobi()"
        )


def check_block(block: Any) -> None:
    """Refuse slots per block that are no count.

    Raises:
        OptionError: with what is possible.
    """
    if block is not None and (isinstance(block, bool) or not isinstance(block, int) or block < 1):
        raise OptionError(
            f"block: expected an integer >= 1 or None, received {block!r}; "
            "None takes the whole canvas, or a block-causal model's own"
        )


def _check_positions(most: int | None, prompt: Prompt, length: int) -> None:
    longest = int(prompt.lengths.max()) + length
    if most is not None and longest > most:
        raise OptionError(
            f"length: expected at most {most} positions, which the model was made for, received "
            f"{longest} for the longest prompt and its canvas; ask for fewer tokens or shorten the "
            "prompt"
        )


def _check_mask(mask_token: int | None, prompt: Prompt) -> None:
    if mask_token is None:
        return
    index = prompt.tokens.new_ones(prompt.tokens.shape).cumsum(1) - 1
    found = (prompt.tokens == mask_token) & (index < prompt.lengths[:, None])
    if bool(found.any()):
        row = int(found.any(1).nonzero()[0])
        raise OptionError(
            f"prompt: expected no mask token, received id {mask_token} in row {row}; leave open "
            "slots to the canvas, and give known ones by a layout"
        )


def _check_blocks(model: Denoiser, prompt: Prompt, length: int, block: int | None) -> None:
    check_block(block)
    if model.block is None:
        if block is not None and length % block and block < length:
            raise OptionError(
                f"block: expected one that divides {length} slots, received {block}; "
                f"ask for {-(-length // block) * block} slots, or choose another block"
            )
        return
    if block is not None and (model.block % block):
        raise OptionError(
            f"block: expected one that divides the model's blocks of {model.block}, received "
            f"{block}; leave it out for the model's own"
        )
    ends = prompt.lengths.view(prompt.branches, -1) % model.block
    if bool((ends != ends[:1]).any()):
        raise OptionError(
            f"guidance: expected prompts of all branches that end alike in the model's blocks of "
            f"{model.block}, received others; pad the shorter ones on the left"
        )
