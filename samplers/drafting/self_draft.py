"""Drafts of the model itself, attending to part of its cache.

H. Sun et al., "TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical
Speculative Decoding", COLM 2024 (arXiv:2404.11912), section 4.1: where the cache is what a pass
reads, the model over a small part of it drafts cheaply and well.

The drafts' keys and values stand in the model's own cache, at the indices of the window; the
verifying pass writes all of them anew, so that the tokens are those of the whole cache.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from mmaccel.capabilities import explain, refuse
from mmaccel.contracts import Pass
from mmaccel.errors import OptionError
from mmaccel.model_parts import SelfDrafts
from mmaccel.policies import Method, check_method
from mmaccel.samplers.arithmetic import as_called
from mmaccel.samplers.drafting.contract import Drafter, Drafts, DraftSource, OpenRun
from mmaccel.samplers.drafting.in_turn import draft_in_turn


@dataclass(frozen=True)
class SelfDrafting(DraftSource):
    reads_last_scores: ClassVar[bool] = False
    keeps_predictions: ClassVar[bool] = False
    needs = frozenset({"draft passes"})
    needs_layers: ClassVar[bool] = True
    is_held: ClassVar[bool] = False  # whether the first draft of a window chooses for all of them

    @property
    @abstractmethod
    def attention(self) -> Any:
        """Chooses blocks for drafts. One that is no method of attention, but has a `budget` and a
        `block`: the verifying pass chooses those that received most of its own attention.
        """

    def open(self, run: OpenRun) -> Drafter:
        refuse(explain(self, run.model))
        run.model.setup.drafts = self
        return SelfDrafter(self)


@dataclass(eq=False)
class SelfDrafter(Drafter):
    def propose(self, run: OpenRun) -> Drafts:
        rows = run.rows
        prompt = run.prompt
        model = run.model
        assert isinstance(model, SelfDrafts)

        def find_logits(work: Tensor, k: int) -> Tensor:
            before = (rows.columns[:, k : k + 1] - 1).clamp(min=0)
            start = prompt.lengths - 1 + (rows.n_generated + k).repeat(prompt.branches)
            entry = Pass(rows.model_inputs(before, work), start.clamp(min=0))
            run.stats.draft_passes += 1
            with as_called():
                return model.forward_draft(entry, k)

        return draft_in_turn(run, find_logits)

    def close(self, run: OpenRun) -> None:
        run.model.setup.drafts = None


@dataclass(frozen=True)
class SelfDraft(SelfDrafting):
    """Drafts of the model itself under a method of sparse attention, which every draft asks anew.

    Args:
        method: chooses the blocks, such as `mmaccel.Quest(budget=0.05)`.

    Loses: as `Vegas`.
    """

    method: Any = field()

    def __post_init__(self) -> None:
        example = "mmaccel.Quest(budget=0.05)"
        check_method("attention", self.method, Method, example)
        if self.method.slot != "attention":
            raise OptionError(
                f"SelfDraft: expected a method of attention such as {example}, received "
                f"{self.method!r}; it goes into {self.method.slot}="
            )
        if "prompt blocks" in self.method.needs:
            raise OptionError(
                f"SelfDraft: expected a method that chooses for every pass, received "
                f"{self.method!r}, which chooses for a prompt; take {example}"
            )

    @property
    def attention(self) -> Method:
        method: Method = self.method
        return method
