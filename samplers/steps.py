"""Steps: how the passes of a run are carried out, one by one or as something recorded before.

A pass of a window sampler works on tensors that stay where they are for the whole run, reads
nothing back and has shapes that depend on its width alone. So an engine may record it once per
width and play the record from then on; what is here does no such thing and is always right.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mmaccel.samplers.kept_runs import Shelf


class Steps(Protocol):
    """Carries out passes.

    Attributes:
        is_static: whether passes are recorded, so that a run has to keep every tensor in its place
            and should not narrow its window at a row's end.
        sync_every: passes between two looks of the host at what they made, at least 1.
        reason: why passes are not recorded; empty where nobody asked for it.
        captures: passes recorded so far.
        shelf: where finished runs are kept with their records; None keeps none.
        mark: another object after every `begin`.
    """

    is_static: bool
    sync_every: int
    reason: str
    captures: int
    mark: object

    @property
    def shelf(self) -> Shelf | None:
        """Where finished runs are kept."""

    @property
    def name(self) -> str:
        """What statistics call it."""

    def play(self, key: Hashable | None, step: Callable[[], None]) -> bool:
        """Carry out a pass.

        Args:
            key: passes of one run with the same key are the same work on the same tensors; None
                for a pass like no other.
            step: the pass, run as it is or recorded.

        Returns:
            Whether the pass took as long as others with this key will: recording takes longer.
        """

    def begin(self) -> None:
        """A new run with tensors of its own: forget what was recorded."""


class Eager:
    """Runs every pass as it is.

    Args:
        sync_every: as in `Steps`.
        reason: as in `Steps`.
    """

    is_static = False
    name = "eager"
    captures = 0
    shelf: Shelf | None = None
    mark: object = None

    def __init__(self, sync_every: int = 1, reason: str = "") -> None:
        self.sync_every, self.reason = sync_every, reason

    def play(self, key: Hashable | None, step: Callable[[], None]) -> bool:
        """See `Steps.play`."""
        step()
        return True

    def begin(self) -> None:
        """Nothing was recorded."""


def steps_of(model: object) -> Steps:
    """A token model's own `steps`, or `Eager` where it has none."""
    own: Steps | None = getattr(model, "steps", None)
    return Eager() if own is None else own
