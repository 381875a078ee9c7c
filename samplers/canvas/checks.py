"""Checks of a canvas run before its first pass.

`check_run` refuses arguments that do not fit together. `check_leaks` is a self-check of the model
before completed blocks are cached for good: does the first block depend on later ones? Such a model
would be cached wrongly without any visible error. Models that were checked when they were wrapped
say so (`is_self_checked`). Others run three passes that differ in the second block alone (full of
mask tokens, and of two sets of other tokens) and must agree on the first block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmaccel.capabilities import explain, refuse
from mmaccel.checks import check_int, show
from mmaccel.contracts import CanvasPass, Denoiser, Prompt
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.samplers.canvas.cache_plan import CachePlan
from mmaccel.samplers.checks import check_noise
from mmaccel.samplers.compare_logits import Tolerance, compare_logits, is_possible
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams

_TOLERANCE = Tolerance(largest=1e-2)  # the passes have one shape, so that rounding is small
_LOW = 8  # the first block's ids are below this


def check_run(
    policy: Any,
    model: Denoiser,
    prompt: Prompt,
    length: int,
    params: SamplingParams,
    noise: Noise,
    block: int | None,
    cache: CachePlan,
) -> None:
    """Refuse arguments of a run that do not fit together.

    Raises:
        OptionError: a model that decodes token after token, no slots, more than the model has
            positions for, blocks that do not divide them, continuous batching on a model that
            keeps something for its rows, a mask token in the prompt, a logits processor, evenly
            spread samples, or guidance whose branches begin their blocks elsewhere.
        ShapeError: noise for another batch.
        UnsupportedModelError: a model that lacks what the policy needs.
    """
    check_model(model)
    refuse(explain(policy, model))
    check_int("length", length, 1, hint="ask for at least 1 slot")
    check_noise(noise.seeds, prompt.batch)
    if prompt.batching is not None and not model.any_rows:
        raise OptionError(
            f"batching: expected None for a {type(model).__name__}, which keeps something for each "
            f"row of the prompt, received {show(prompt.batching)}; decode batch by batch"
        )
    if params.processor is not None:
        raise OptionError(
            "params: expected no processor, received one; a canvas has no prefix for it, use a "
            "layout for what may stand at a slot"
        )
    if params.is_spread:
        raise OptionError(
            f"spread: expected None on a canvas, whose slots are filled in any order, received "
            f"{params.spread}; leave it out"
        )
    params.check_branches(prompt.branches)
    most = model.max_positions
    longest = int(prompt.lengths.max()) + length
    if most is not None and longest > most:
        raise OptionError(
            f"length: expected at most {most} positions, which the model was made for, received "
            f"{longest} for the longest prompt and its canvas; ask for fewer tokens or shorten the "
            "prompt"
        )
    index = torch.arange(prompt.tokens.shape[1], device=prompt.tokens.device)
    is_mask = (prompt.tokens == model.mask_token) & (index < prompt.lengths[:, None])
    if model.mask_token is not None and bool(is_mask.any()):
        raise OptionError(
            f"prompt: expected no mask token, received id {model.mask_token} in row "
            f"{int(is_mask.any(1).nonzero()[0])}; leave open slots to the canvas, and give known "
            "ones by a layout"
        )
    _check_blocks(model, prompt, length, block)
    if cache.kind == "block" and block not in (None, model.block):
        raise OptionError(
            f"block: expected the model's own {model.block} with a block-causal cache, received "
            f"{block}; leave it out"
        )


def check_model(model: Any) -> None:
    """Raises OptionError for a model that decodes token after token."""
    if not isinstance(model, Denoiser):
        raise OptionError(
            f"policy: expected one that decodes token after token for a {type(model).__name__}, "
            "received one that fills a canvas; choose one such as Jacobi()"
        )


def _check_blocks(model: Denoiser, prompt: Prompt, length: int, block: int | None) -> None:
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


@torch.no_grad()
def check_leaks(model: Denoiser, rows: int) -> None:
    """Refuse a block-causal model with a KV cache whose first block depends on the second.

    The check passes where nothing can be compared (NaN, fewer than two tokens, no position after
    the first block).

    Args:
        model: the denoiser.

    Raises:
        UnsupportedModelError: the first block depends on the second.
    """
    block = model.block
    mask = model.mask_token
    assert block is not None
    most = model.max_positions
    later = block if most is None else min(block, most - block)
    low = [i for i in range(min(model.vocab_size, _LOW)) if i != mask]
    if model.is_self_checked or later < 1 or not low:
        return
    head = torch.tensor([low[k % len(low)] for k in range(block)], device="cpu", dtype=torch.int64)
    if mask is not None:
        head[::2] = mask  # some models return committed tokens unchanged, whatever they see
    blank = torch.full(
        (rows, later), low[0] if mask is None else mask, device="cpu", dtype=torch.int64
    )
    wanted = _first_block(model, head, blank)
    ids = is_possible(wanted).any(0).any(0).nonzero()[:, 0].cpu()  # no padding of the vocabulary
    ids = ids if mask is None else ids[ids != mask]
    if bool(wanted.isnan().any()) or not len(ids):
        return
    for tail in _tails(ids, rows, later):
        if compare_logits(wanted, _first_block(model, head, tail)).within(_TOLERANCE):
            continue
        raise UnsupportedModelError(
            f"cache: expected a model whose logits depend on no later block, for cache 'block', "
            f"received a {type(model).__name__} whose first block of {block} does; choose "
            'cache="none", or hide from an entry what its `reads` leaves out'
        )


def _tails(ids: Tensor, rows: int, width: int) -> list[Tensor]:
    """Two second blocks `[R, width]` of ids from the whole vocabulary, the same for every model of
    a size; they differ in every token, where there are two ids.
    """
    n = len(ids)
    spread = torch.Generator().manual_seed(0)
    mixed = ids[torch.randperm(n, generator=spread, device="cpu")]
    at = torch.arange(rows * width, device="cpu").view(rows, width)
    return [mixed[(at + shift) % n] for shift in (0, n // 2)]


def _first_block(model: Denoiser, head: Tensor, tail: Tensor) -> Tensor:
    """Logits `[R, block, V]` of a first block `[block]`, computed with what follows it."""
    rows, block = len(tail), len(head)
    tokens = torch.cat([head.expand(rows, -1), tail], 1).to(model.device)
    n = tokens.shape[1]
    index = torch.arange(n, device=tokens.device)
    reads = torch.zeros(n, n + 1, dtype=torch.bool, device=tokens.device)
    reads[:, :-1] = index // block <= index[:, None] // block
    all_rows = index.expand(rows, -1)
    model.reserve(rows, n + 1)
    entries = CanvasPass(
        tokens=tokens,
        positions=all_rows,
        cache_indices=all_rows,
        reads=reads.expand(rows, -1, -1),
        queries=all_rows[:, :block],
    )
    return model.forward(entries)
