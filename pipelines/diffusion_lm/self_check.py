"""Self-check of a denoiser: do a model's passes follow their masks and positions?

A model that builds its own mask, or takes positions from the order of its input, returns other
logits than those asked for and no error. A model that is wrongly said to be block-causal would be
cached wrongly. So every model runs a few random tokens when it is wrapped. Each check compares two
passes that must agree, or that must differ.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass, Prompt
from mmaccel.errors import MMAccelError, UnsupportedModelError
from mmaccel.pipelines.layers.attention_name import own_attention
from mmaccel.samplers.arithmetic import own_arithmetic
from mmaccel.samplers.canvas.layout import Columns
from mmaccel.samplers.compare_logits import Tolerance, compare_logits

LENGTHS = (1, 4)  # of the random prompts: the shorter one is padded
_SPARE = 4  # cache indices that nothing is written to
_passed: WeakKeyDictionary[Any, set[tuple[Any, ...]]] = WeakKeyDictionary()


class CheckedDenoiser(Protocol):
    """A denoiser over a module; see `mmaccel.contracts.Denoiser`.

    One that supports a KV cache also has `own_logits`.

    Attributes:
        shift: 1 if the logits at a position are those of the next one, 0 if they are its own.
        n_ids: ids of the model.
    """

    model: Any
    vocab_size: int
    block: int | None
    supports_kv_cache: bool
    shift: int
    n_ids: int

    @property
    def device(self) -> torch.device:
        """Where passes run."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""

    def reserve(self, rows: int, positions: int) -> None:
        """Clear the cache and reserve `positions` cache indices for each of `rows` rows."""

    def forward(self, entries: CanvasPass) -> Tensor:
        """Logits `[R, Q, V]` of a pass."""


@own_arithmetic()
def check_denoiser(model: CheckedDenoiser) -> None:
    """Refuse a model whose passes do not follow their masks and positions.

    A model whose logits cannot be compared (NaN, all alike) passes, and is checked again next time.

    Raises:
        UnsupportedModelError: with the first difference.
    """
    inner = model.model
    config = getattr(inner, "config", None)
    key = (
        type(model),
        model.supports_kv_cache,
        model.block,
        model.shift,
        model.dtype,
        own_attention(config),
    )
    if key in _passed.get(inner, ()):
        return
    if model.device.type == "meta":
        _refuse(model, "no weights (the model is on the meta device)")
    try:
        was_compared = DenoiserCheck(model).run()
    except MMAccelError:
        raise
    except Exception as error:
        _refuse(model, f"a {type(error).__name__} ({' '.join(str(error).split())[:80]})")
    if was_compared:
        _passed.setdefault(inner, set()).add(key)


class DenoiserCheck:
    """The comparisons of one model, on two rows: prompts of 1 and 4 tokens, and a canvas."""

    def __init__(self, model: CheckedDenoiser) -> None:
        self.model = model
        self.length = 5 if model.block is None else 2 * model.block + 3
        wide = max(LENGTHS) + self.length
        n_ids = min(model.vocab_size, model.n_ids)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(n_ids, (2, wide), generator=generator, device="cpu")
        self.ids = ids.to(model.device)
        self._tolerance = Tolerance.of(model.dtype)

    def run(self) -> bool:
        """Run all comparisons; False where logits cannot be compared.

        Raises:
            UnsupportedModelError: a comparison failed.
        """
        prompts, canvas = self.ids.split([max(LENGTHS), self.length], 1)
        both = self._whole(prompts, LENGTHS, canvas)
        if not compare_logits(both, both).is_telling:
            return False
        alone = self._whole(prompts[:1, :1], LENGTHS[:1], canvas[:1])
        self._same(
            both[:1], alone, "other logits for a row in a batch with a longer one than alone"
        )
        self._check_later_slots(prompts, canvas, both)
        self._check_blocks(prompts, canvas, both)
        if self.model.supports_kv_cache:
            self._check_cache()
        return True

    def _whole(self, prompts: Tensor, lengths: tuple[int, ...], canvas: Tensor) -> Tensor:
        """Logits `[R, L, V]` of a pass over prompt and canvas."""
        model = self.model
        prompt = Prompt(prompts.contiguous(), prompts.new_tensor(lengths))
        columns = Columns(prompt, self.length, model.block if model.supports_kv_cache else None)
        model.reserve(len(lengths), columns.n)
        slots = torch.arange(self.length, device=prompts.device).expand(len(lengths), -1)
        return model.forward(columns.as_rows(canvas[None], columns.is_real, slots))

    def _check_later_slots(self, prompts: Tensor, canvas: Tensor, before: Tensor) -> None:
        """The first slot attends to later ones of its block."""
        last = self.length - 1 if self.model.block is None else self.model.block - 1 - LENGTHS[0]
        if last < 1:
            return
        changed = canvas.clone()
        changed[0, last] = self._other(canvas[0, last])
        after = self._whole(prompts, LENGTHS, changed)
        if compare_logits(before[:1, :1], after[:1, :1]).mean == 0:
            _refuse(self.model, "logits that depend on no later position, as a causal model's")

    def _check_blocks(self, prompts: Tensor, canvas: Tensor, before: Tensor) -> None:
        """The first block attends to no later one."""
        block = self.model.block
        if block is None:
            return
        first = max(block - LENGTHS[0], 1)  # slot of row 0 that begins a later block
        changed = canvas.clone()
        changed[0, first:] = self._other(canvas[0, first:])
        after = self._whole(prompts, LENGTHS, changed)
        what = f"logits of the first block that depend on later blocks of {block} positions"
        self._same(before[:1, :first], after[:1, :first], what)

    def _check_cache(self) -> None:
        """Keys at scrambled cache indices, in scrambled order, and partly from an earlier pass."""
        model: Any = self.model
        n = 9 if model.block is None else max(9, model.block + 2)  # some of it in a second block
        ids = self.ids[:, :n]
        own = model.own_logits(ids)
        fewer = model.own_logits(ids[:, :-1])
        whole, part, hidden = scrambled_passes(ids, model.block)
        model.reserve(len(ids) + 1, whole.reads.shape[-1])
        for entries, wanted, what in (
            (whole, own, "other logits than its own from keys at scrambled cache indices"),
            (part, own, "other logits than its own from cached keys"),
            (hidden, fewer, "logits that depend on masked cache indices"),
        ):
            at = entries.positions.gather(1, entries.queries)
            wide = at[..., None].expand(-1, -1, wanted.shape[-1])
            self._same(wanted.gather(1, wide), model.forward(entries), what)

    def _same(self, expected: Tensor, received: Tensor, what: str) -> None:
        difference = compare_logits(expected, received)
        if not difference.within(self._tolerance):
            _refuse(self.model, f"{what} ({difference})")

    def _other(self, tokens: Tensor) -> Tensor:
        """Other tokens than these."""
        return (tokens + 1) % min(self.model.vocab_size, self.model.n_ids)


def scrambled_passes(ids: Tensor, block: int | None) -> tuple[CanvasPass, CanvasPass, CanvasPass]:
    """Three passes over the same row, each to give the logits of a plain pass.

    Args:
        ids: `[R, N]` int64, N at least 3.
        block: positions per block of a block-causal model, or None.

    Returns:
        A pass over all positions; one over some of them, reading the others' keys from the first
        pass; and one over all but the last, which is hidden.
    """
    rows, n = ids.shape
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randperm, generator=generator, device="cpu")
    shuffled = [draw(n + _SPARE)[:n] for _ in range(rows)]
    cache_index = torch.stack(shuffled).to(ids.device)  # [R, N], of a position
    group = torch.arange(n, device=ids.device) // (block or n)
    later = draw(n - 1).add(1).to(ids.device)
    order = torch.cat([later, later.new_zeros(1)])  # all but position 0 are queried

    def build(positions: Tensor, hidden: int) -> CanvasPass:
        size = (rows, len(positions), n + _SPARE + 1)
        reads = torch.zeros(size, dtype=torch.bool, device=ids.device)
        visible = group <= group[positions][:, None]  # [C, N]
        visible[:, n - hidden :] = False
        index = cache_index[:, None].expand(-1, len(positions), -1)
        reads.scatter_(2, index, visible.expand(rows, -1, -1))
        queries = (positions > 0).nonzero()[:, 0].expand(rows, -1)
        at = positions.expand(rows, -1)
        return CanvasPass(
            tokens=ids.gather(1, at),
            positions=at,
            cache_indices=cache_index.gather(1, at),
            reads=reads,
            queries=queries,
        )

    return build(order, 0), build(order[: n // 2], 0), build(order[order < n - 1], 1)


def _refuse(model: CheckedDenoiser, received: str) -> NoReturn:
    raise UnsupportedModelError(
        f"model: expected one that follows the masks and positions of a canvas pass, received "
        f"{received} from a {type(model.model).__name__}; check block and shift, or use another "
        "model"
    )
