"""A block-causal model that takes 4-D masks and keeps its keys and values, as a `Denoiser`."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass
from mmaccel.errors import OptionError, ShapeError
from mmaccel.pipelines.place_store import StoredCalls
from mmaccel.pipelines.queried_logits import gather_rows


class BlockDenoiser:
    """Passes of a canvas through a model that `block_trial.check_block_mask` found to follow masks.

    Args:
        calls: of the model, with the form of mask it takes.
        vocab_size, mask_token, block, device: see `mmaccel.canvas_contracts.Denoiser`.
        max_positions: positions the model was made for, or None.
    """

    has_store = is_self_checked = True

    def __init__(
        self,
        calls: StoredCalls,
        vocab_size: int,
        mask_token: int,
        block: int,
        device: torch.device,
        max_positions: int | None = None,
    ) -> None:
        self._calls, self.max_positions = calls, max_positions
        self.vocab_size, self.mask_token, self.block = vocab_size, mask_token, block
        self.device = device
        self._rows = self._places = 0

    def reserve(self, rows: int, places: int) -> None:
        """Make room; see `mmaccel.canvas_contracts.Denoiser.reserve`."""
        self._rows, self._places = rows, places
        self._calls.reserve(rows, places)

    def forward(self, entries: CanvasPass) -> Tensor:
        """One pass; see `mmaccel.canvas_contracts.Denoiser.forward`.

        Raises:
            ShapeError: more rows or other places than reserved.
            OptionError: a position beyond what the model was made for.
        """
        rows, places = entries.tokens.shape[0], entries.reads.shape[-1]
        if rows > self._rows or places > self._places:
            raise ShapeError(
                f"pass: expected at most {self._rows} rows of {self._places} places, received "
                f"{rows} of {places}; call reserve(rows, places)"
            )
        most = self.max_positions
        if most is not None and places > most and int(entries.positions.max()) >= most:
            raise OptionError(
                f"positions: expected at most {most}, which the model was made "
                "for, received more; ask for fewer tokens"
            )
        logits = self._calls.run(entries.tokens, entries.positions, entries.places, entries.reads)
        return gather_rows(logits, entries.queries)
