"""What every codec's decoder gives: numbers within limits."""

from __future__ import annotations

from torch import Tensor

from mmaccel.errors import NumericsError


def limit(
    values: Tensor, low: int = 0, expected: str = "pixels: expected values", row: int | None = None
) -> Tensor:
    """Decoded `values` within `low`..1; NumericsError with NaN or infinity among them. `expected`
    begins its message, `row` is the run's row whose values these are.
    """
    if not bool(values.isfinite().all()):
        raise NumericsError(
            f"{expected} in {low}..1, received NaN or infinity from the codec; "
            "copy its weights again",
            () if row is None else (row,),
        )
    return values.clamp(low, 1)
