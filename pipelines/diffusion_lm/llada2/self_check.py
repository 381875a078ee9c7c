"""Self-check of a LLaDA2: do passes over cached blocks give the logits of its own call?

`mmaccel.pipelines.diffusion_lm.llada2.block_masks` declares how a model class reads masks. Nothing
is cached on a declaration alone. Three blocks of random tokens go through the model in one call,
and then as one block and two more over its cached keys and values. All logits must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mmaccel.errors import NumericsError
from mmaccel.pipelines.diffusion_lm.cached_passes import CachedPasses
from mmaccel.pipelines.diffusion_lm.llada2.block_masks import make_reads
from mmaccel.samplers.arithmetic import own_arithmetic
from mmaccel.samplers.compare_logits import Tolerance, same_logits

_BLOCKS = 3  # the first is cached, the second reads it, the third must be hidden from the second


def check_call(
    model: CachedPasses,
    reading: str | None,
    block: int,
    is_padded: bool,
    call: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> str:
    """Compare the call that a pipeline makes, under a 2-D mask, with passes over cached blocks.

    Args:
        model: over a KV cache.
        reading: declared, see `BlockMasks`.
        block: columns per block.
        is_padded: whether the 2-D mask hides anything; models may run other code then.
        call: the pipeline's call: ids, mask and positions, each `[R, N]`, to logits `[R, N, V]`.
            Its errors reach the caller.

    Returns:
        Why nothing can be cached; empty where the passes agree.

    Raises:
        NumericsError: NaN logits.

    Cost: three passes, over three, one and two blocks; one pass where `reading` is None.
    """
    ids, visible, positions = random_inputs(model, block, is_padded)
    with own_arithmetic(), torch.no_grad():
        own = call(ids, visible, positions)
    where = visible.bool()
    if bool(own[where].isnan().any()):
        raise NumericsError(
            "logits: expected numbers, received NaN; check the model's dtype and weights"
        )
    if reading is None:
        return (
            "logits of earlier blocks change with later ones under the 2-D mask that the pipeline "
            "passes, as BLOCK_MASKS declares, so their keys and values cannot be cached"
        )
    cached = partial(_run, model, ids, visible, block, reading, [0, block, _BLOCKS * block])
    difference = same_logits(lambda: [own], cached, Tolerance.strict(model.dtype), where=where)
    if not difference:
        return ""
    kind = "padded" if is_padded else "unpadded"
    return (
        f"{kind} passes over cached blocks of {block} do not give the logits of the model's own "
        f"call but {difference} where its 2-D mask is read as {reading!r}"
    )


def random_inputs(
    model: CachedPasses, block: int, is_padded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, a 2-D mask and positions of a call, each `[2, N]` int64.

    With padding, one row has more than a block of it on the left, as prompts do, and the other has
    a part of a block on the right, as after the last token.
    """
    n = _BLOCKS * block
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (2, n), generator=generator, device="cpu")
    visible = torch.ones(2, n, dtype=torch.int64, device="cpu")
    if is_padded:
        visible[0, : block + 1] = 0
        visible[1, n - (block + 1) // 2 :] = 0
    positions = torch.arange(n, device="cpu").expand(2, -1)
    return ids.to(model.device), visible.to(model.device), positions.to(model.device)


def _run(
    model: CachedPasses, ids: Tensor, visible: Tensor, block: int, reading: str, bounds: list[int]
) -> list[Tensor]:
    """Logits `[2, N, V]` of passes over the columns between bounds."""
    columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    model.reserve(*ids.shape)
    parts = []
    for first, last in zip(bounds, bounds[1:]):
        reads = make_reads(visible, first, last, block, reading)
        at = columns[:, first:last]
        parts.append(model.run_all(ids[:, first:last], at, at, reads))
    return [torch.cat(parts, 1)]
