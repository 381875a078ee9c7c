"""Sources that copy known tokens: the last one, those of the row above, those of the frame before.

Y. Teng et al., ICLR 2025 (arXiv 2410.01699), section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmaccel.contracts import Layout
from mmaccel.errors import OptionError
from mmaccel.samplers.drafting.contract import Drafts, DraftSource, Frontier
from mmaccel.samplers.drafting.copying import copy_back, last_known


@dataclass(frozen=True)
class _Copies(DraftSource):
    is_capturable = True
    reads_last_scores = False


@dataclass(frozen=True)
class Left(_Copies):
    """Copies of each row's last known token."""

    name = "left"

    def propose(self, frontier: Frontier) -> Drafts:
        return Drafts(last_known(frontier))


@dataclass(frozen=True)
class PeriodicCopies(_Copies):
    forms: ClassVar[str] = ""  # what tokens form where there is a period

    def period(self, layout: Layout) -> int:
        """Slots of a period, 0 where there is none."""
        raise NotImplementedError

    def propose(self, frontier: Frontier) -> Drafts:
        assert frontier.layout is not None
        return Drafts(copy_back(frontier, self.period(frontier.layout)))

    def check_layout(self, layout: Layout | None) -> None:
        if layout is None or self.period(layout) < 1:
            raise OptionError(
                f"drafts={self.name!r}: expected a model whose tokens form {self.forms}, received "
                "one without; use drafts='left', or give a layout"
            )


@dataclass(frozen=True)
class Above(PeriodicCopies):
    """Tokens of the row above; in the first row copies of the last known token."""

    forms = "rows"
    name = "above"

    def period(self, layout: Layout) -> int:
        return layout.columns


@dataclass(frozen=True)
class PreviousFrame(PeriodicCopies):
    """Tokens of the previous frame; in the first one copies of the last known token."""

    forms = "frames"
    name = "previous-frame"

    def period(self, layout: Layout) -> int:
        return layout.frame
