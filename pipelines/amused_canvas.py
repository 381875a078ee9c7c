"""aMUSEd's transformer as a `Denoiser`: picture tokens of a grid, all of them in every pass.

S. Patil et al., "aMUSEd: An Open MUSE Reproduction", 2024, arXiv 2401.01808; the model is
`diffusers.UVit2DModel`. A caption is a condition of the model and no part of the line, so that the
line is one column that means nothing, and the slots of the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass
from mmaccel.contracts import Layout


class GridDenoiser:
    """Passes of a canvas run through a model of a grid of tokens.

    Args:
        call: the model, `[R, h, w]` int64 to logits `[R, V, h, w]`.
        conditions: what it is told besides; tensors of `[G * B, ...]`, and what is for all rows.
        grid: (h, w).
        mask_token: what an open slot holds, no id of the codebook.
        vocab_size: V, ids of the codebook.
        branches: G; with 2 the model is told of the unconditional rows first.
    """

    block, has_store = None, False

    def __init__(
        self,
        call: Callable[..., Tensor],
        conditions: Mapping[str, Any],
        grid: tuple[int, int],
        mask_token: int,
        vocab_size: int,
        branches: int,
    ) -> None:
        self._call, self._grid, self._branches = call, grid, branches
        self.mask_token, self.vocab_size = mask_token, vocab_size
        self._conditions = {name: self._ordered(value) for name, value in conditions.items()}
        tensors = [value for value in conditions.values() if isinstance(value, Tensor)]
        self.device: torch.device = tensors[0].device

    def reserve(self, rows: int, places: int) -> None:
        """See `Denoiser.reserve`; nothing is kept."""

    def forward(self, entries: CanvasPass) -> Tensor:
        """One pass; see `Denoiser.forward`."""
        rows = entries.tokens.shape[0]
        tokens = entries.tokens[:, 1:].unflatten(1, self._grid)  # [R, h, w]
        told = {name: self._rows(value, rows) for name, value in self._conditions.items()}
        logits = self._call(tokens, **told).flatten(2).transpose(1, 2)  # [R, h * w, V]
        index = (entries.queries - 1)[..., None].expand(-1, -1, self.vocab_size)
        return logits.gather(1, index)

    def _ordered(self, value: Any) -> Any:
        """Conditional rows first."""
        if not isinstance(value, Tensor) or self._branches == 1:
            return value
        return torch.cat(value.chunk(self._branches)[::-1])

    def _rows(self, value: Any, rows: int) -> Any:
        """`[G * B, ...]` for `[G * K * B]` rows."""
        if not isinstance(value, Tensor) or value.shape[0] == rows:
            return value
        split = value.unflatten(0, (self._branches, 1, -1))
        copies = rows // value.shape[0]
        return split.expand(-1, copies, *split.shape[2:]).flatten(0, 2)


class KnownTokens:
    """Layout of a grid some of whose tokens are known.

    Args:
        base: what else is known, or None.
        latents: `[B, h, w]` int64, the mask token where a slot is open.
        mask_token: its id.
    """

    def __init__(self, base: Layout | None, latents: Tensor, mask_token: int) -> None:
        self._base, self._width = base, latents.shape[-1]
        self._known = torch.where(latents == mask_token, -1, latents).flatten(1)  # [B, h * w]

    @property
    def columns(self) -> int:
        """See `Layout`."""
        return self._width

    @property
    def frame(self) -> int:
        """See `Layout`."""
        return self._known.shape[1]

    def forced(self, slots: Tensor) -> Tensor:
        """See `Layout`; `slots` of a run's own rows."""
        known = self._known.gather(1, slots)
        forced = None if self._base is None else self._base.forced(slots)
        return known if forced is None else torch.where(known < 0, forced, known)

    def allowed(self, slots: Tensor) -> Tensor | None:
        """See `Layout`."""
        return None if self._base is None else self._base.allowed(slots)
