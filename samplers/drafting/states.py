"""What coarse drafts ask of a token model: its hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class StateModel(Protocol):
    """A token model that hands out the hidden states from which it computes its logits.

    Attributes:
        last_states: `[R, W, D]` of the last pass, any float dtype, where they are kept.
        coarse: folder of the coarse model that ships with the model, or None.
    """

    last_states: Tensor | None
    coarse: Path | None

    def keep_states(self, wanted: bool) -> None:
        """From now on passes store `last_states`, or do not."""

    def output_matrix(self) -> Tensor:
        """`[V, D]`: a state's logits are its products with these rows, up to a bias."""
