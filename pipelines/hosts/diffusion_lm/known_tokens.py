"""Layout of a canvas some of whose tokens are known."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.contracts import Layout


@dataclass(frozen=True, eq=False)
class KnownTokens:
    """What is known of a canvas goes before the caller's layout."""

    known: Tensor  # [B, L] int64, -1 where a slot is open
    base: Layout | None  # the caller's
    offset: int = 0  # slots of it before this canvas
    columns: int = 0
    frame: int = 0

    def forced(self, slots: Tensor) -> Tensor:
        known = self.known.gather(1, slots)
        forced = None if self.base is None else self.base.forced(slots + self.offset)
        return known if forced is None else torch.where(known < 0, forced, known)

    def allowed(self, slots: Tensor) -> Tensor | None:
        return None if self.base is None else self.base.allowed(slots + self.offset)
