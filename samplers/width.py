"""Window widths: what a window loop asks how wide the next pass is to be.

The adaptive chooser has a file of its own, `mmaccel.samplers.adaptive_width`.
"""

from __future__ import annotations

from mmaccel.samplers.adaptive_width import AdaptiveWidth, Records


class FixedWidth:
    """Always the same width, but never wider than what is still wanted."""

    def __init__(self, width: int) -> None:
        self.widest = width

    def choose(self, remaining: int) -> int:
        """Width of the next pass; `remaining` >= 1 is the longest unfinished row's rest."""
        return min(self.widest, remaining)

    def observe(self, n_tokens: float, n_rows: int, seconds: float) -> None:
        """Nothing to learn."""


class ConstantWidth(FixedWidth):
    """Always the same width, beyond a row's end too.

    For samplers whose tokens depend on the width: how far a batch reaches must not enter a row.
    """

    def choose(self, remaining: int) -> int:
        """Width of the next pass, whatever remains."""
        return self.widest


def make_chooser(
    window: int | str,
    exactness: str,
    rows: int = 1,
    length: int = 256,
    records: Records | None = None,
) -> FixedWidth | AdaptiveWidth:
    """What chooses the widths of a run.

    Args:
        window: the policy's window, "adaptive" or an integer.
        exactness: the policy's promise; only tokens that are bitwise the plain loop's allow the
            width to follow the rows' ends.
        rows, length, records: see `AdaptiveWidth`.
    """
    if window == "adaptive":
        return AdaptiveWidth(rows, length, records)
    return FixedWidth(int(window)) if exactness == "bitwise" else ConstantWidth(int(window))
