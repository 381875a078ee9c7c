"""A trial before keys of earlier blocks are kept for good: does the first block see later ones?

A model that looks at later blocks, whatever its passes say, would be cached wrongly and nobody
would see it. Models that were tried when they were wrapped say so (`is_tried`); others are tried
here, by three passes that differ in the second block alone: full of masks, of some tokens, of
others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass, Denoiser
from mmaccel.errors import UnsupportedModelError

_MOST = 1e-2  # of the logits' standard deviation: beyond what rounding does
_MASKED = 1e3  # below a position's largest logit: as good as -inf, as heads fill padded ids
_LOW = 8  # ids of the first block: below this


@torch.no_grad()
def check_leaks(model: Denoiser, rows: int) -> None:
    """Refuse a block-causal model with a store whose first block looks at the second.

    Where nothing can be compared (NaN, no two tokens, no position behind the first block) it
    passes.

    Args:
        rows: of a pass.

    Raises:
        UnsupportedModelError: it does.
    """
    block, mask = model.block, model.mask_token
    assert block is not None
    most = getattr(model, "max_positions", None)
    behind = block if most is None else min(block, most - block)
    low = [i for i in range(min(model.vocab_size, _LOW)) if i != mask]
    if getattr(model, "is_tried", False) or behind < 1 or not low:
        return
    head = torch.tensor([low[k % len(low)] for k in range(block)], device="cpu")
    if mask is not None:
        head[::2] = mask  # some models give committed tokens back, whatever they see
    blank = torch.full((rows, behind), low[0] if mask is None else mask, device="cpu")
    wanted = _first_block(model, head, blank)
    ids = _is_possible(wanted).any(0).any(0).nonzero()[:, 0].cpu()  # no padding
    ids = ids if mask is None else ids[ids != mask]
    if not len(ids):
        return
    if any(_differs(wanted, _first_block(model, head, tail)) for tail in _tails(ids, rows, behind)):
        raise UnsupportedModelError(
            f"cache: expected a model whose logits depend on no later block, for cache 'block', "
            f"received a {type(model).__name__} whose first block of {block} does; choose "
            'cache="none", or hide from an entry what its `reads` leaves out'
        )


def _tails(ids: Tensor, rows: int, behind: int) -> list[Tensor]:
    """Two second blocks `[R, behind]` from all over the ids, the same for every model of a size;
    they differ in every token, where there are two.
    """
    n, spread = len(ids), torch.Generator().manual_seed(0)
    mixed = ids[torch.randperm(n, generator=spread, device="cpu")]
    at = torch.arange(rows * behind, device="cpu").view(rows, behind)
    return [mixed[(at + shift) % n] for shift in (0, n // 2)]


def _first_block(model: Denoiser, head: Tensor, tail: Tensor) -> Tensor:
    """Logits `[R, block, V]` float32 of a first block `[block]`, computed with what follows it."""
    rows, block = len(tail), len(head)
    tokens = torch.cat([head.expand(rows, -1), tail], 1).to(model.device)
    n = tokens.shape[1]
    index = torch.arange(n, device=tokens.device)
    reads = torch.zeros(n, n + 1, dtype=torch.bool, device=tokens.device)
    reads[:, :-1] = index // block <= index[:, None] // block
    all_rows = index.expand(rows, -1)
    model.reserve(rows, n + 1)
    entries = CanvasPass(
        tokens, all_rows, all_rows, reads.expand(rows, -1, -1), all_rows[:, :block]
    )
    return model.forward(entries).float()


def _differs(wanted: Tensor, received: Tensor) -> bool:
    """Whether logits are others, or finite elsewhere; finite ones that are as good as -inf are the
    same.
    """
    finite = wanted.isfinite()
    if not torch.equal(finite, received.isfinite()):
        return True
    gap = (wanted.maximum(_floor(wanted)) - received.maximum(_floor(received)))[finite].abs().max()
    scale = wanted[_is_possible(wanted)].std(correction=0)
    return float(gap) > _MOST * float(scale)


def _is_possible(logits: Tensor) -> Tensor:
    return logits.isfinite() & (logits > _floor(logits))


def _floor(logits: Tensor) -> Tensor:
    """`[R, block, 1]`, below which an id is as good as masked."""
    peak = logits.masked_fill(~logits.isfinite(), float("-inf")).amax(-1, keepdim=True)
    return peak - _MASKED
