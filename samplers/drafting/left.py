"""The last known token, once more.

Left-neighbour drafts: Y. Teng et al., "Accelerating Auto-regressive Text-to-Image Generation with
Training-free Speculative Jacobi Decoding", ICLR 2025 (arXiv 2410.01699), section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel.samplers.drafting.contract import Drafts, DraftSource, Frontier
from mmaccel.samplers.drafting.copying import last_known


@dataclass(frozen=True)
class Left(DraftSource):
    """Copies of each row's last known token."""

    is_capturable = True
    reads_last_scores = False
    name = "left"

    def propose(self, frontier: Frontier) -> Drafts:
        return Drafts(last_known(frontier))
