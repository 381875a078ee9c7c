"""SpecDec++: drafting stops where one of the drafts is likely rejected already.

K. Huang, X. Guo, M. Wang, "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate
Lengths", COLM 2025 (arXiv 2405.19715): the best rule is such a threshold.

Departures: the paper trains a head that predicts acceptance. Here nothing is trained: the
prediction is the draft model's own probability of its draft, raised to a power.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.checks import within
from mmaccel.samplers.drafting.lengths.contract import Drafted, DraftLength


@dataclass(frozen=True)
class SpecDecPP(DraftLength):
    """Drafts until the probability of a rejection is above a threshold.

    Args:
        threshold: of the probability that at least one draft is rejected.
        power: of the draft model's probability, which then counts as that of acceptance; 0.5 for a
            draft model that is less sure than it could be.

    Loses: as `SVIP`.
    """

    threshold: float = within(0.7, 0, 1, "the paper takes 0.7")
    power: float = within(1.0, 0, 16, "1 takes probabilities as they are")

    def goes_on(self, drafted: Drafted) -> Tensor:
        return 1 - (drafted.confidences**self.power).prod(1) <= self.threshold
