"""Self-check of a denoiser: do a model's passes follow their masks and positions?

Every model runs a few random tokens when it is wrapped: one that builds its own mask, takes
positions from the order of its input, or is wrongly called block-causal raises no error. Each check
compares two passes that must agree, or must differ.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass, Prompt
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.diffusion_lm.selected_logits import gather_rows
from mmaccel.pipelines.hosts.layers.attention_name import own_attention
from mmaccel.samplers.canvas.layout import Columns, seen_blocks
from mmaccel.samplers.compare_logits import Tolerance, compare_logits, same_logits

LENGTHS = (1, 4)  # of the random prompts: the shorter one is padded
_SPARE = 4  # cache indices that nothing is written to
_FAULTS = (
    "other logits for a row in a batch with a longer one than alone",
    "logits of the first block that depend on later blocks",
    "other logits than its own from keys at scrambled cache indices",
    "other logits than its own from cached keys",
    "logits that depend on masked cache indices",
)
_passed: WeakKeyDictionary[Any, set[tuple[Any, ...]]] = WeakKeyDictionary()


def check_denoiser(model: Any) -> None:
    """Refuse a `Denoiser` whose passes do not follow masks and positions; where logits cannot be
    compared (NaN, all alike) it passes, and is checked again next time.
    """
    inner = model if model.model is None else model.model
    attention = own_attention(getattr(inner, "config", None))
    key = type(model), model.supports_kv_cache, model.block, model.shift, model.dtype, attention
    if key in _passed.get(inner, ()):
        return
    is_empty = model.device.type == "meta"
    fault = "no weights (the model is on the meta device)" if is_empty else find_fault(model)
    if fault:
        raise UnsupportedModelError(
            "model: expected one that follows the masks and positions of a canvas pass, received "
            f"{fault} from a {type(inner).__name__}; check block and shift, or use another model"
        )
    if fault is not None:
        _passed.setdefault(inner, set()).add(key)


def find_fault(model: Any) -> str | None:
    """What does not follow masks and positions; "" for nothing, None if nothing compares."""
    check = DenoiserCheck(model)
    reason = same_logits(check.run, check.run_otherwise, Tolerance.of(model.dtype), faults=_FAULTS)
    if check.is_causal:
        return "logits that depend on no later position, as a causal model's"
    return reason


class DenoiserCheck:
    """The passes of one model that are compared (`_FAULTS`): prompts of 1 and 4 tokens, a canvas.

    The last three, over scrambled cache indices, are of models with a KV cache.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.is_causal = self._knows_own = False
        self._block = self.length = 5
        if model.block is not None:
            self.length = 2 * model.block + 3
            self._block = max(model.block - LENGTHS[0], 1)  # slots of row 0 in the first block
        if model.max_positions is not None:
            self.length = min(self.length, model.max_positions - max(LENGTHS))
            self._block = min(self._block, self.length)
        wide = max(LENGTHS) + self.length
        self._n_ids = min(model.vocab_size, model.n_ids or model.vocab_size)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self._n_ids, (2, wide), generator=generator, device="cpu")
        self._ids = ids.to(model.device)
        n = 9 if model.block is None else max(9, model.block + 2)  # some of it in a second block
        self._cached_ids = self._ids[:, :n].clone()
        if model.mask_token is not None:  # a canvas has open slots, and committed ones
            self._ids[:, max(LENGTHS) :: 2] = model.mask_token
        self._passes = scrambled_passes(self._cached_ids, model.block)

    def run(self) -> list[Tensor]:
        """What is right, of each pass."""
        both = self._change([])
        if self._block > 1:  # the first slot attends to the last one of its block
            difference = compare_logits(both[:1, :1], self._change([self._block - 1])[:1, :1])
            self.is_causal = difference.is_telling and difference.mean == 0
        expected = [both[:1], both[:1, : self._block]]
        own = self.model.own_logits(self._cached_ids) if self.model.supports_kv_cache else None
        self._knows_own = own is not None
        if own is not None:
            fewer = self.model.own_logits(self._cached_ids[:, :-1])
            for entries, logits in zip(self._passes, (own, own, fewer), strict=True):
                expected.append(gather_rows(logits, entries.positions))
        return expected

    def run_otherwise(self) -> list[Tensor]:
        """What has to be the same."""
        prompts, canvas = self._ids.split([max(LENGTHS), self.length], 1)
        alone = self._whole(prompts[:1, :1], LENGTHS[:1], canvas[:1])
        before_others = alone
        if self.model.block is not None:
            later = slice(self._block, None)
            before_others = self._change(later, self.model.mask_token)[:1, : self._block]
        received = [alone, before_others]
        if self._knows_own:
            self.model.reserve(len(self._ids) + 1, self._passes[0].reads.shape[-1])
            received += [self.model.forward(entries) for entries in self._passes]
        return received

    def _change(self, slots: Any, token: int | None = None) -> Tensor:
        """Logits `[2, L, V]` with one token, or other ones, at slots of the first row."""
        prompts, canvas = self._ids.split([max(LENGTHS), self.length], 1)
        changed = canvas.clone()
        changed[0, slots] = (canvas[0, slots] + 1) % self._n_ids if token is None else token
        return self._whole(prompts, LENGTHS, changed)

    def _whole(self, prompts: Tensor, lengths: tuple[int, ...], canvas: Tensor) -> Tensor:
        """Logits `[R, L, V]` of a pass over prompt and canvas."""
        model = self.model
        prompt = Prompt(prompts.contiguous(), prompts.new_tensor(lengths))
        block = model.block if model.supports_kv_cache else None
        columns = Columns(prompt, self.length, block, model.shift)
        model.reserve(len(lengths), columns.n)
        slots = torch.arange(self.length, device=prompts.device).expand(len(lengths), -1)
        logits: Tensor = model.forward(columns.as_rows(canvas[None], columns.is_real, slots))
        return logits


def scrambled_passes(ids: Tensor, block: int | None) -> tuple[CanvasPass, CanvasPass, CanvasPass]:
    """Three passes over the same rows `[R, N]`, N >= 3, each to give the logits of a plain pass: of
    all positions; of some, over the others' keys; of all but the last, which is hidden.
    """
    rows, n = ids.shape
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randperm, generator=generator, device="cpu")
    shuffled = [draw(n + _SPARE)[:n] for _ in range(rows)]
    cache_index = torch.stack(shuffled).to(ids.device)  # [R, N], of a position
    index = torch.arange(n, device=ids.device)
    order = draw(n).to(ids.device)

    def build(positions: Tensor, hidden: int) -> CanvasPass:
        size = (rows, len(positions), n + _SPARE + 1)
        reads = torch.zeros(size, dtype=torch.bool, device=ids.device)
        visible = seen_blocks(index, positions, block or n)  # [C, N]
        visible[:, n - hidden :] = False
        # an entry that sees position p reads the cache index of p in its row
        written = cache_index[:, None].expand(-1, len(positions), -1)
        reads.scatter_(2, written, visible.expand(rows, -1, -1))
        at = positions.expand(rows, -1)
        return CanvasPass(
            tokens=ids.gather(1, at),
            positions=at,
            cache_indices=cache_index.gather(1, at),
            reads=reads,
            queries=torch.arange(len(positions), device=ids.device).expand(rows, -1),
        )

    return build(order, 0), build(order[: n // 2], 0), build(order[order < n - 1], 1)
