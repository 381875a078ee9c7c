"""Bold drafts that are revised: commit on little confidence, take back what turns out wrong.

F. Hong et al., "Wide-In, Narrow-Out: Revokable Decoding for Efficient and Effective DLLMs" (WINO),
ICLR 2026, arXiv 2507.18578. Token editing: LLaDA2.1, see `mmaccel.samplers.canvas.revision`.

Departures: three revisers, per row; a slot that is taken back draws from its next law with the
noise it had. Nats count every commit, and are no bound on what revision makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmaccel.canvas_contracts import Denoiser
from mmaccel.checks import check_choice, check_int, check_number
from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError
from mmaccel.results import Generation
from mmaccel.samplers.canvas.checks import check_model
from mmaccel.samplers.canvas.confident_parallel import Threshold
from mmaccel.samplers.canvas.policy import SelectorPolicy
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.revision import (
    EditReviser,
    RedoReviser,
    RevisedRun,
    Reviser,
    ShadowReviser,
    ShadowRun,
)
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.selector import AtLeast, LogitsOnly, Selector, SelectorState, top

_USUAL = {"shadow": 0.9, "edit": 0.5, "redo": 0.9}


@dataclass(frozen=True)
class RevisedParallel(SelectorPolicy):
    """Reference decoder: `Stepwise("confidence")`, which it is with threshold 1 and a reviser that
    finds nothing.

    Args:
        threshold: least probability of a slot's likeliest token.
        revise: "shadow" takes tokens back that the others would not bring about (WINO; needs a
            model with a store), "edit" replaces tokens where the model prefers others (a model
            trained to edit), "redo" decodes unsure ones again once a block is full.
        least: probability below which a token is taken back or redone, or that another one needs to
            replace it; None: 0.9 for "shadow" and "redo", 0.5 for "edit".
        budget: passes "edit" may take over a full block.
        block, cache: as in `Stepwise`.
    """

    threshold: float = 0.6
    revise: str = "shadow"
    least: float | None = None
    budget: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        Threshold(self.threshold)
        check_choice("revise", self.revise, tuple(_USUAL))
        if self.least is not None:
            check_number("least", self.least, 0, 1, f"{_USUAL[self.revise]} is usual")
        check_int("budget", self.budget, 0, hint="16 is usual")

    @property
    def run_type(self) -> type[CanvasRun]:
        """See `mmaccel.samplers.canvas.policy.RunPolicy`."""
        return ShadowRun if self.revise == "shadow" else RevisedRun

    def open(self, model: Denoiser, prompt: Prompt, length: int, **options: Any) -> CanvasRun:
        """A run of this policy, before its first pass.

        Raises:
            OptionError: a model of uniform corruption, which has no mask to check with.
        """
        check_model(model)
        if model.mask_token is None and self.revise == "shadow":
            raise OptionError(
                "revise: expected a model with a mask token for 'shadow', received one of uniform "
                "corruption; choose 'edit' or 'redo'"
            )
        layout = "entries" if self.revise == "shadow" else "rows"
        return super().open(model, prompt, length, layout=layout, **options)

    def decode(self, run: CanvasRun) -> Generation:
        """Fill the canvas of a run of this policy."""
        assert isinstance(run, RevisedRun)
        run.revise_by(self.reviser(run))
        return super().decode(run)

    def reviser(self, run: RevisedRun) -> Reviser:
        """What revises a run."""
        least = _USUAL[self.revise] if self.least is None else self.least
        if self.revise == "shadow":
            return ShadowReviser(run, least)
        if self.revise == "edit":
            return EditReviser(run, least, self.budget)
        return RedoReviser(run, least)

    def chooser(self, run: CanvasRun, memory: SelectorState) -> Selector:
        """See `SelectorPolicy`; as much of it as the reviser allows."""
        assert isinstance(run, RevisedRun)
        return AtLeast(1, Bold(super().chooser(run, memory), run))

    def selector(self, run: CanvasRun, memory: SelectorState) -> Selector:
        """See `SelectorPolicy`."""
        return Threshold(self.threshold)


class Bold(LogitsOnly):
    """What a selector takes, as much of it as the reviser allows."""

    def __init__(self, selector: Selector, run: RevisedRun) -> None:
        self._selector, self._run = selector, run

    def select(self, seen: SlotPredictions, memory: SelectorState) -> Tensor:
        """See `Selector`."""
        chosen = self._selector.select(seen, memory)
        return top(self.rank(seen), chosen, self._run.reviser.most(seen))

    def rank(self, seen: SlotPredictions) -> Tensor:
        """See `Selector`."""
        return self._selector.rank(seen)
