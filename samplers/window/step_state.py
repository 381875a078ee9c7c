"""Tensors that outlive a step, and keep their addresses where steps are captured.

A `StaticPart` of a run has some that every run begins with. What a step hands to the next one is in
the `StepState`.

A captured step runs no Python when it is replayed. So a value reaches the next step only in a
tensor that both know: `Held` stores a value in the same tensor every time. Which of them a run's
first pass stores is known after it was carried out once, also to the runs that replay it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class StaticPart:
    """Base of the parts of a run.

    Attributes:
        static: names of the attributes that are such tensors; some may be None in a run.
    """

    static: ClassVar[tuple[str, ...]] = ()

    def static_inputs(self) -> dict[str, Tensor]:
        """These tensors by name, with the values that the run begins with."""
        found = {name: getattr(self, name) for name in self.static}
        return {name: value for name, value in found.items() if value is not None}

    def use_static(self, inputs: Mapping[str, Tensor]) -> None:
        """Go on with other tensors of the same values, `static_inputs` by name."""
        for name, value in inputs.items():
            assert name in self.static, name
            setattr(self, name, value)


class StepState:
    """The held tensors of one run, by name; the first axis of each is the batch slot.

    Args:
        is_static: whether steps are captured.
        device: of the tensors.

    Attributes:
        tensors: by name; those of an earlier run hold what is ignored.
        names: of what the run has stored so far.
    """

    def __init__(self, is_static: bool, device: torch.device) -> None:
        self.is_static = is_static
        self.device = device
        self.tensors: dict[str, Tensor] = {}
        self._declared: set[str] = set()
        self.names: set[str] = set()

    def declare(self, name: str) -> Held:
        """A tensor that steps hand to each other; each name is declared once in a run."""
        assert name not in self._declared, name
        self._declared.add(name)
        return Held(self, name)

    def declare_fields(self, cls: Callable[..., T]) -> T:
        """An instance of a dataclass whose fields are all `Held`, and are named after it."""
        kind: Any = cls
        return cls(*(self.declare(f"{kind.__name__} {field.name}") for field in fields(kind)))

    def keep_rows(self, batch_slots: Tensor) -> None:
        """Go on with some batch slots alone, `[n]` int64."""
        self.tensors = {name: value[batch_slots] for name, value in self.tensors.items()}


class Held:
    """A tensor that a step hands to the next one; see `StepState.declare`."""

    __slots__ = ("_name", "_state")

    def __init__(self, state: StepState, name: str) -> None:
        self._state = state
        self._name = name

    @property
    def value(self) -> Tensor | None:
        """What the last step of this run has stored, `[B, ...]`; None before the first."""
        return self._state.tensors[self._name] if self._name in self._state.names else None

    def get(self) -> Tensor:
        """`value`, which is there: an earlier step of the run has stored it."""
        found = self.value
        assert found is not None, self._name
        return found

    def hold(self, value: Tensor) -> None:
        """Store `[B, ...]` for the next step, always of one shape where steps are captured.

        Nobody but its owner writes to it any more.
        """
        state = self._state
        state.names.add(self._name)
        stored = state.tensors.get(self._name)
        if not state.is_static:
            state.tensors[self._name] = value
        elif stored is None:  # two that share memory would overwrite each other
            state.tensors[self._name] = value.clone()
        elif stored is not value:
            stored.copy_(value)

    def room(self, shape: tuple[int, ...]) -> Tensor:
        """A float32 tensor to write what `hold` will store; the stored one where steps are static,
        so that what the last step stored there has been read before.
        """
        stored = self._state.tensors.get(self._name) if self._state.is_static else None
        if stored is not None:
            return stored
        return torch.empty(shape, device=self._state.device, dtype=torch.float32)
