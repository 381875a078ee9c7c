"""SVIP: drafting stops where the draft model is uncertain.

Z. Zhang et al., "Draft Model Knows When to Stop: Self-Verification Speculative Decoding for
Long-Form Generation", EMNLP 2025 (arXiv 2411.18462): how far target and draft are apart, and so how
likely a draft is rejected, is bounded by the root of the draft's entropy. Nothing is trained.

Departures: the draft of the uncertain step is verified as well, as its pass was made.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.checks import within
from mmaccel.samplers.drafting.lengths.contract import Drafted, DraftLength


@dataclass(frozen=True)
class SVIP(DraftLength):
    """Drafts until the root of the entropy is above a threshold.

    Args:
        threshold: in root nats; 0 drafts one token wherever the draft model is uncertain at all.

    Loses: where drafts are nearly free, in batches (the most confident row goes on), and where a
    draft model is confidently wrong.
    """

    threshold: float = within(0.6, hint="0.6 is a start")

    def goes_on(self, drafted: Drafted) -> Tensor:
        return drafted.entropy.sqrt() <= self.threshold
