"""The loan: how a run takes a kept one's tensors from a shelf, and gives them back at its end.

See `mmaccel.samplers.kept_runs` for what is kept, and what makes two runs of one kind.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable
from weakref import ref

import torch
from torch import Tensor

from mmaccel.contracts import Policy, Prompt, TokenModel
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.kept_runs import Kept, Key, Shelf
from mmaccel.samplers.steps import Steps

if TYPE_CHECKING:
    from mmaccel.samplers.window_pass import WindowPass

_STEP = 64  # columns, slots: room for these is rounded up, so that prompts of many lengths share it


class Extent(NamedTuple):
    """Room of a run: columns before slot 0, slots, and positions of the model's cache."""

    origin: int
    slots: int
    positions: int


def measure(prompt: Prompt, length: int, *, rounded: bool = False, most: Any = None) -> Extent:
    """The room a run takes.

    Args:
        prompt: what stands before slot 0.
        length: slots wanted.
        rounded: leave some room for other prompts and lengths.
        most: positions the model has, if that is known; nothing is rounded up beyond.
    """
    origin, needed = prompt.tokens.shape[1], prompt.tokens.shape[1] + length - 1
    if not rounded:
        return Extent(origin, length, needed)  # the last token is not fed
    origin, slots = (-(-n // _STEP) * _STEP for n in (origin, length))
    positions = origin + slots - 1
    return Extent(origin, slots, positions if most is None else max(needed, min(positions, most)))


class Loan:
    """What one run has of a shelf, from its beginning to its end.

    Args:
        shelf, key: where and under what a run is kept.
        extent: room of the run.
    """

    def __init__(self, shelf: Shelf, key: Key, extent: Extent) -> None:
        self._shelf, self._key, self.extent = shelf, key, extent
        self._epoch, self._kept = shelf.epoch, shelf.take(key)

    def settle(self, run: WindowPass) -> None:
        """Give a new run the tensors of a kept one, filled with its own; or tensors of its own."""
        own = {name: value for name, value in vars(run).items() if isinstance(value, Tensor)}
        if self._kept is None:
            run.steps.begin()
            # the caller's tensors are not written to by the next run
            own = {name: value.clone() for name, value in own.items()}
            run.noise = type(run.noise)(run.noise.seeds.clone(), run.noise.items.clone())
        else:
            kept = self._kept
            for name, value in own.items():
                kept.tensors[name].copy_(value)
            kept.tally.clear()
            kept.noise.refill(run.noise)
            own, run.noise, run.tally, run.steps = kept.tensors, kept.noise, kept.tally, kept.steps
            run.take_places(kept.held)
        vars(run).update(own)
        self._tensors, self._mark = own, run.steps.mark

    def reserve(self, model: Any, rows: int) -> None:
        """Make room in a model, or give it the buffers it had."""
        self._model = model
        if self._kept is not None:
            model.resume(self._kept.window)
        else:
            model.reserve(rows, self.extent.positions)
            model.own()

    def free(self) -> bool:
        """Let everything else go that is kept, for want of memory; whether there was something."""
        found = self._shelf.clear()
        self._epoch = self._shelf.epoch
        if found and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return found

    def give_back(self, run: WindowPass) -> None:
        """Keep a run that came to its end, unless its passes are no longer recorded."""
        steps = run.steps
        if not steps.reason and steps.mark is self._mark:
            window = self._model.keep()
            kept = Kept(
                steps, self._mark, self._tensors, run.places, run.tally, run.noise, window
            )  # fmt: skip
            self._shelf.put(self._key, kept, self._epoch)


@runtime_checkable
class Resumable(Protocol):
    """A token model whose buffers outlive a run."""

    def baked(self) -> tuple[Any, Hashable, Hashable]:
        """The model whose passes these are, the state it is in, and what else a record holds."""

    def own(self) -> None:
        """Behind `reserve`: from now on nothing of the caller's is written to."""

    def keep(self) -> Any:
        """The buffers of a run that came to its end."""

    def resume(self, kept: Any) -> None:
        """In the place of `reserve`: an earlier run's buffers, filled with what this one's are."""


def borrow(
    steps: Steps, policy: Policy, model: TokenModel, prompt: Prompt, length: int, filters: Filters,
    *others: Any,
) -> Loan | None:  # fmt: skip
    """The loan of a run; None where nothing is kept.

    Args:
        steps: carry out its passes.
        policy, model, prompt, length, filters: of the run.
        others: what else its passes have as numbers.
    """
    shelf, layout = steps.shelf, prompt.layout
    if shelf is None or not steps.is_static or filters.processor is not None:
        return None
    if not isinstance(model, Resumable) or not (_is_value(policy) and _is_value(layout)):
        return None
    extent = measure(prompt, length, rounded=True, most=getattr(model, "max_positions", None))
    owner, state, kind = model.baked()
    n_stops = None if prompt.stop_tokens is None else len(prompt.stop_tokens)
    own = (policy, type(filters), filters, layout, prompt.batch, prompt.branches, n_stops, extent)
    key = Key(ref(owner), state, (*own, *others, steps.sync_every, prompt.tokens.device, kind))
    try:
        hash(key)
    except TypeError:  # a policy's or a layout's field that is no value
        return None
    return Loan(shelf, key, extent)


def _is_value(item: Any) -> bool:
    """Whether an object stays what it is: None, or a frozen dataclass."""
    settings = getattr(type(item), "__dataclass_params__", None)
    return item is None or bool(getattr(settings, "frozen", False))
