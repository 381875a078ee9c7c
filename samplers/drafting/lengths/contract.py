"""The contract of rules of length: when a draft model stops drafting.

A `DraftLength` is a `DraftModel`'s field `length`. After each draft it is asked whether the row
goes on; a draft model stops once no row does, and the last draft is verified too. Behind its last
draft a row has copies of its last known token, whose distribution is one-hot, so that a row's
drafts are its own whatever other rows do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from mmaccel.checks import Checked
from mmaccel.samplers.drafting.contract import OpenRun


class Drafted(NamedTuple):
    """What a draft model has drafted for a window so far, k drafts of each row."""

    last: Tensor  # [B, V], from which the last of them was drawn
    confidences: Tensor  # [B, k], the draft model's probability of each

    @property
    def entropy(self) -> Tensor:
        """`[B]`, of the last distribution, in nats."""
        return -(self.last * self.last.clamp(min=1e-30).log()).sum(-1)


@dataclass(frozen=True)
class DraftLength(Checked):
    """Base of rules; a child implements `goes_on`, or `open` if it learns from passes."""

    def goes_on(self, drafted: Drafted) -> Tensor:
        """`[B]` bool, the rows for which another draft is worth its pass, after one or more."""
        raise NotImplementedError

    def open(self, run: OpenRun) -> LengthJudge:
        return LengthJudge(self)


@dataclass(eq=False)
class LengthJudge:
    rule: DraftLength

    def goes_on(self, run: OpenRun, drafted: Drafted) -> Tensor:
        return self.rule.goes_on(drafted)

    def accepted(self, run: OpenRun, n_new: Tensor) -> None:
        """Read how many tokens each row gained, `[B]` int64."""

    def begin_rows(self, run: OpenRun, batch_slots: Tensor) -> None: ...
