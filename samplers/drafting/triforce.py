"""TriForce: the first draft of a window retrieves the chunks that all its drafts read.

H. Sun et al., COLM 2024 (arXiv:2404.11912), section 4.1, retrieval-based drafting: chunks of keys
are compared with a query by their means, and the best ones are kept for many drafts.

Departures: the middle level of the hierarchy alone, without the tiny model that drafts for it; the
chunks are retrieved anew for every window, and what was written since is read in any case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmaccel.catalog import make
from mmaccel.checks import within
from mmaccel.policies import Method
from mmaccel.samplers.drafting.self_draft import SelfDrafting


@dataclass(frozen=True)
class TriForce(SelfDrafting):
    """Drafts of the model itself over chunks whose mean keys match the first draft's query.

    Args:
        budget: the fraction of a row's chunks that drafts read, in (0, 1].
        block: entries of a chunk.
        first_layer: layers before it read everything.

    Loses: as `Vegas`.
    """

    budget: float = within(0.1, 0, 1, "0.1 suits most models", above_low=True)
    block: int = within(16, 1, 1024, "16 suits most models")
    first_layer: int = within(2, hint="2 suits most models")

    name = "triforce"
    is_held: ClassVar[bool] = True

    @property
    def attention(self) -> Method:
        options = {"budget": self.budget, "block": self.block, "first_layer": self.first_layer}
        method: Method = make("attention", "dhsa", **options)
        return method
