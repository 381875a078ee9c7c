"""Self-check of a denoiser: does a model's canvas pass go by what it is told?

A model that builds a mask of its own, or takes positions from the order of its input, gives other
logits than those asked for and no error; a model said to be block-causal that is none would be
cached wrongly. So every model runs a few made-up tokens when it is wrapped. Every check compares
two passes that must agree (or must not).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass
from mmaccel.contracts import Prompt
from mmaccel.errors import MMAccelError, UnsupportedModelError
from mmaccel.samplers.canvas.layout import Columns
from mmaccel.samplers.compare_logits import Tolerance, compare_logits

if TYPE_CHECKING:
    from mmaccel.pipelines.diffusion_lm.cached import CachedDenoiser
    from mmaccel.pipelines.diffusion_lm.uncached import UncachedDenoiser

LENGTHS = (1, 4)  # of the made-up prompts: the shorter one is padded
_SPARE = 4  # places that nothing is ever written to
_passed: WeakKeyDictionary[Any, set[tuple[Any, ...]]] = WeakKeyDictionary()


def check_denoiser(model: CachedDenoiser | UncachedDenoiser) -> None:
    """Refuse a model that does not do what passes over a canvas ask of it.

    Where nothing can be compared (NaN, no spread) the model passes this time.

    Args:
        model: around one in evaluation mode.

    Raises:
        UnsupportedModelError: with what was seen.
    """
    inner = model.model
    config = getattr(inner, "config", None)
    key = (
        type(model), model.supports_kv_cache, model.block, model.shift, model.dtype,
        getattr(config, "_attn_implementation", None),
    )  # fmt: skip
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
    """The comparisons of one model, on two rows: prompts of 1 and 4 tokens and a canvas."""

    def __init__(self, model: CachedDenoiser | UncachedDenoiser) -> None:
        self.model = model
        self.length = 5 if model.block is None else 2 * model.block + 3
        wide = max(LENGTHS) + self.length
        n_ids = min(model.vocab_size, model.n_ids)
        spread = torch.Generator().manual_seed(0)
        self.ids = torch.randint(n_ids, (2, wide), generator=spread).to(model.device)
        self._tolerance = Tolerance.of(model.dtype)

    def run(self) -> bool:
        """All comparisons; False where nothing could be compared.

        Raises:
            UnsupportedModelError: the first that failed.
        """
        prompts, canvas = self.ids.split([max(LENGTHS), self.length], 1)
        both = self._whole(prompts, LENGTHS, canvas)
        if not compare_logits(both, both).is_telling:
            return False
        alone = self._whole(prompts[:1, :1], LENGTHS[:1], canvas[:1])
        self._same(both[:1], alone, "other logits for a row beside a longer one than alone")
        self._check_sight(prompts, canvas, both)
        self._check_blocks(prompts, canvas, both)
        if self.model.supports_kv_cache:
            self._check_store()
        return True

    def _whole(self, prompts: Tensor, lengths: tuple[int, ...], canvas: Tensor) -> Tensor:
        """Logits `[R, L, V]` of a pass over everything."""
        model = self.model
        prompt = Prompt(prompts.contiguous(), torch.tensor(lengths, device=prompts.device))
        columns = Columns(prompt, self.length, model.block if model.supports_kv_cache else None)
        model.reserve(len(lengths), columns.n)
        slots = torch.arange(self.length, device=prompts.device).expand(len(lengths), -1)
        return model.forward(columns.as_rows(canvas[None], columns.is_real, slots))

    def _check_sight(self, prompts: Tensor, canvas: Tensor, before: Tensor) -> None:
        """The first slot looks at later ones of its block."""
        last = self.length - 1 if self.model.block is None else self.model.block - 1 - LENGTHS[0]
        if last < 1:
            return
        changed = canvas.clone()
        changed[0, last] = self._other(canvas[0, last])
        after = self._whole(prompts, LENGTHS, changed)
        if compare_logits(before[:1, :1], after[:1, :1]).mean == 0:
            _refuse(self.model, "logits that depend on no later position, as a causal model's")

    def _check_blocks(self, prompts: Tensor, canvas: Tensor, before: Tensor) -> None:
        """The first block looks at no later one."""
        block = self.model.block
        if block is None:
            return
        first = max(block - LENGTHS[0], 1)  # slot of row 0 that begins a later block
        changed = canvas.clone()
        changed[0, first:] = self._other(canvas[0, first:])
        after = self._whole(prompts, LENGTHS, changed)
        what = f"logits of the first block that depend on later blocks of {block} positions"
        self._same(before[:1, :first], after[:1, :first], what)

    def _check_store(self) -> None:
        """Keys at scrambled places, in scrambled order, and partly from an earlier pass."""
        model: Any = self.model
        n = 9 if model.block is None else max(9, model.block + 2)  # some of it in a second block
        ids = self.ids[:, :n]
        own, fewer = model.own_logits(ids), model.own_logits(ids[:, :-1])
        whole, part, hidden = scrambled_passes(ids, model.block)
        model.reserve(len(ids) + 1, whole.reads.shape[-1])
        for entries, wanted, what in (
            (whole, own, "other logits than its own from keys at places of their own"),
            (part, own, "other logits than its own from keys that were kept"),
            (hidden, fewer, "logits that depend on places that are masked"),
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
        All positions; some of them again, looking at what the first pass left of the others; and
        all but the last, which is hidden from them.
    """
    rows, n = ids.shape
    mixed = torch.Generator().manual_seed(1)
    shuffled = [torch.randperm(n + _SPARE, generator=mixed)[:n] for _ in range(rows)]
    place = torch.stack(shuffled).to(ids.device)  # [R, N], of a position
    group = torch.arange(n, device=ids.device) // (block or n)
    whole = torch.randperm(n - 1, generator=mixed).add(1).to(ids.device)
    order = torch.cat([whole, whole.new_zeros(1)])  # all but the first position is asked for

    def build(positions: Tensor, hidden: int) -> CanvasPass:
        reads = torch.zeros(rows, len(positions), n + _SPARE + 1, dtype=torch.bool)
        reads = reads.to(ids.device)
        seen = group <= group[positions][:, None]  # [C, N]
        seen[:, n - hidden :] = False
        reads.scatter_(2, place[:, None].expand(-1, len(positions), -1), seen.expand(rows, -1, -1))
        asked = (positions > 0).nonzero()[:, 0].expand(rows, -1)
        at = positions.expand(rows, -1)
        return CanvasPass(ids.gather(1, at), at, place.gather(1, at), reads, asked)

    return build(order, 0), build(order[: n // 2], 0), build(order[order < n - 1], 1)


def _refuse(model: CachedDenoiser | UncachedDenoiser, received: str) -> NoReturn:
    raise UnsupportedModelError(
        f"model: expected one that goes by the masks and positions of a canvas pass, received "
        f"{received} from a {type(model.model).__name__}; check block and shift, or use another "
        "model"
    )
