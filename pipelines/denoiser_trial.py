"""A trial before anything is promised: does a model's canvas pass go by what it is told?

A model that builds a mask of its own, or takes positions from the order of its input, gives other
logits than those asked for and no error; a model said to be block-causal that is none would be
cached wrongly. So every model is tried on a few made-up tokens when it is wrapped. Every check
compares two passes that must agree (or must not).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.errors import MMAccelError, UnsupportedModelError
from mmaccel.pipelines.window_trial import find_tolerance, is_possible
from mmaccel.samplers.canvas_columns import Columns

if TYPE_CHECKING:
    from mmaccel.pipelines.stored_denoiser import StoredDenoiser
    from mmaccel.pipelines.whole_denoiser import WholeDenoiser

LENGTHS = (1, 4)  # of the made-up prompts: the shorter one is padded
_passed: WeakKeyDictionary[Any, set[tuple[Any, ...]]] = WeakKeyDictionary()


def check_by_trial(model: StoredDenoiser | WholeDenoiser) -> None:
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
        type(model), model.has_store, model.block, model.shift, model.dtype,
        getattr(config, "_attn_implementation", None),
    )  # fmt: skip
    if key in _passed.get(inner, ()):
        return
    if model.device.type == "meta":
        _refuse(model, "no weights (the model is on the meta device)")
    try:
        was_told = Trial(model).run()
    except MMAccelError:
        raise
    except Exception as error:
        _refuse(model, f"a {type(error).__name__} ({' '.join(str(error).split())[:80]})")
    if was_told:
        _passed.setdefault(inner, set()).add(key)


class Trial:
    """Of one model, on two rows: prompts of 1 and 4 tokens and a canvas."""

    def __init__(self, model: StoredDenoiser | WholeDenoiser) -> None:
        self.model = model
        self.length = 5 if model.block is None else 2 * model.block + 3
        wide = max(LENGTHS) + self.length
        n_ids = min(model.vocab_size, model.n_ids)
        spread = torch.Generator().manual_seed(0)
        self.ids = torch.randint(n_ids, (2, wide), generator=spread).to(model.device)
        self._tolerance = find_tolerance(model.dtype)
        self._scale = 1.0

    def run(self) -> bool:
        """All checks; False where nothing could be compared.

        Raises:
            UnsupportedModelError: the first that failed.
        """
        prompts, canvas = self.ids.split([max(LENGTHS), self.length], 1)
        both = self._whole(prompts, LENGTHS, canvas)
        possible = both[is_possible(both)]
        if both.isnan().any() or not float(possible.std()) > 0:
            return False
        self._scale = float(possible.std())
        alone = self._whole(prompts[:1, :1], LENGTHS[:1], canvas[:1])
        self._same(both[:1], alone, "other logits for a row beside a longer one than alone")
        self._check_sight(prompts, canvas, both)
        self._check_blocks(prompts, canvas, both)
        if self.model.has_store:
            self._check_store()
        return True

    def _whole(self, prompts: Tensor, lengths: tuple[int, ...], canvas: Tensor) -> Tensor:
        """Logits `[R, L, V]` of a pass over everything."""
        model = self.model
        prompt = Prompt(prompts.contiguous(), torch.tensor(lengths, device=prompts.device))
        columns = Columns(prompt, self.length, model.block if model.has_store else None)
        model.reserve(len(lengths), columns.n)
        slots = torch.arange(self.length, device=prompts.device).expand(len(lengths), -1)
        return model.forward(columns.whole(canvas[None], columns.is_real, slots)).float()

    def _check_sight(self, prompts: Tensor, canvas: Tensor, before: Tensor) -> None:
        """The first slot looks at later ones of its block."""
        last = self.length - 1 if self.model.block is None else self.model.block - 1 - LENGTHS[0]
        if last < 1:
            return
        changed = canvas.clone()
        changed[0, last] = self._other(canvas[0, last])
        after = self._whole(prompts, LENGTHS, changed)
        if self._gap(before[:1, :1], after[:1, :1]) == 0:
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
        from mmaccel.pipelines.scrambled_passes import scrambled_passes
        from mmaccel.pipelines.stored_denoiser import StoredDenoiser

        model = self.model
        assert isinstance(model, StoredDenoiser)
        n = 9 if model.block is None else max(9, model.block + 2)  # some of it in a second block
        ids = self.ids[:, :n]
        own = model.own_logits(ids).float()
        fewer = model.own_logits(ids[:, :-1]).float()
        whole, part, hidden = scrambled_passes(ids, model.block)
        model.reserve(len(ids) + 1, whole.reads.shape[-1])
        for entries, wanted, what in (
            (whole, own, "other logits than its own from keys at places of their own"),
            (part, own, "other logits than its own from keys that were kept"),
            (hidden, fewer, "logits that depend on places that are masked"),
        ):
            at = entries.positions.gather(1, entries.queries)
            wide = at[..., None].expand(-1, -1, wanted.shape[-1])
            self._same(wanted.gather(1, wide), model.forward(entries).float(), what)

    def _same(self, wanted: Tensor, received: Tensor, what: str) -> None:
        gap = self._gap(wanted, received)
        if gap > self._tolerance:
            _refuse(self.model, f"{what} ({gap:.2g} standard deviations off)")

    def _gap(self, wanted: Tensor, received: Tensor) -> float:
        """Mean difference of logits in their standard deviations."""
        possible = is_possible(wanted)
        if received.isnan().any() or not torch.equal(is_possible(received), possible):
            return float("inf")
        return float((received - wanted)[possible].abs().mean()) / self._scale

    def _other(self, tokens: Tensor) -> Tensor:
        """Other tokens than these."""
        return (tokens + 1) % min(self.model.vocab_size, self.model.n_ids)


def _refuse(model: StoredDenoiser | WholeDenoiser, received: str) -> NoReturn:
    raise UnsupportedModelError(
        f"model: expected one that goes by the masks and positions of a canvas pass, received "
        f"{received} from a {type(model.model).__name__}; check block and shift, or use another "
        "model"
    )
