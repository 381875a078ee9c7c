"""StepRecorder: what a window run tells somebody who wants more of its steps than tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from mmaccel.samplers.window.run import WindowRun


class StepRecorder(Protocol):
    """Receives what the passes of a run give out, and which of their slots were accepted.

    A token model carries it in its attribute `recorder`, as it carries its `runner`.

    Attributes:
        is_active: whether it records anything in a pass. Such passes are not captured, because
            what they give out is stored by the host.
    """

    is_active: bool

    def record(self, name: str, value: Any, skipped: int = 0) -> None:
        """Note a value of the current pass.

        Args:
            name: "logits" or "scores"; a token model may record values of other names.
            value: `[B, W, V]`, or what belongs to another name.
            skipped: entries of the window before the first one that the value covers.
        """

    def accept(self, first: Tensor, n_new: Tensor) -> None:
        """Keep the noted values of accepted slots, and forget the others.

        Args:
            first: `[B]` int64, the slot of the pass's first entry.
            n_new: `[B]` int64, how many entries were accepted.
        """

    def finish(self, run: WindowRun) -> None:
        """Called once, when all rows have ended and the cache still holds them."""
