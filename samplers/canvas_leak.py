"""Self-check before earlier blocks are cached for good: does the first block see later ones?

A model that looks at later blocks, whatever its passes say, would be cached wrongly and nobody
would see it. Models that were checked when they were wrapped say so (`is_self_checked`); others run
three passes here that must agree on the first block, and differ in the second block alone: full of
masks, of some tokens, of others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass, Denoiser
from mmaccel.errors import UnsupportedModelError
from mmaccel.samplers.compare_logits import Tolerance, compare_logits, is_possible

_TOLERANCE = Tolerance(largest=1e-2)  # the passes are of one shape: hardly anything is rounded
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
    if getattr(model, "is_self_checked", False) or behind < 1 or not low:
        return
    head = torch.tensor([low[k % len(low)] for k in range(block)], device="cpu")
    if mask is not None:
        head[::2] = mask  # some models give committed tokens back, whatever they see
    blank = torch.full((rows, behind), low[0] if mask is None else mask, device="cpu")
    wanted = _first_block(model, head, blank)
    ids = is_possible(wanted).any(0).any(0).nonzero()[:, 0].cpu()  # no padding
    ids = ids if mask is None else ids[ids != mask]
    if bool(wanted.isnan().any()) or not len(ids):
        return
    for tail in _tails(ids, rows, behind):
        if compare_logits(wanted, _first_block(model, head, tail)).within(_TOLERANCE):
            continue
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
        tokens, all_rows, all_rows, reads.expand(rows, -1, -1), all_rows[:, :block]
    )
    return model.forward(entries)
