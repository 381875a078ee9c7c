"""ImageGPT: pixels of a palette as tokens, in raster order.

Model: M. Chen et al., "Generative Pretraining from Pixels", ICML 2020. Its attention cuts a causal
mask of its own from a table, by the length of the cache, and takes no other; a window whose rows
stand at different places needs one for each row. So a pass puts its own masks into that table.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.pipelines.causal_lm import CausalLM
from mmaccel.pipelines.window_model import CausalLMWindow


class ImageGPT(CausalLM):
    """`ImageGPTForCausalImageModeling`."""

    name: ClassVar[str] = "imagegpt"

    def wrap(self, model: Any) -> CausalLMWindow:
        """The model in windows, with causal tables of each pass's own."""
        return _Tables(model)


class _Tables(CausalLMWindow):
    reserved = (*CausalLMWindow.reserved, "_table")
    _table: Tensor

    def reserve(self, rows: int, positions: int) -> None:
        """Also makes room for one table `[R, 1, S, S]` of booleans, shared by all layers."""
        super().reserve(rows, positions)
        room = positions + 1
        self._table = torch.zeros(rows, 1, room, room, dtype=torch.bool, device=self.device)

    @property
    def _shown(self) -> torch.Tensor:
        """Tables of the pass's rows."""
        assert self._placement is not None
        return self._table[: self._placement.rows]

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        """As in `CausalLMWindow`; what a window has beyond the table scores nothing: zeros."""
        inside = super().forward(tokens[:, : self._table.shape[-1]], start)
        return F.pad(inside, (0, 0, 0, tokens.shape[1] - inside.shape[1]))

    def _swapped(self) -> dict[str, Tensor]:
        """Every layer's causal table, replaced by the pass's."""
        names = (name for name, _ in self.model.named_buffers() if name.endswith(".attn.bias"))
        return super()._swapped() | dict.fromkeys(names, self._shown)

    def _run(self, **inputs: Any) -> Any:
        seen = inputs.pop("attention_mask") == 0  # [R, 1, W, span]
        width, span = seen.shape[2:]
        self._shown[:, :, span - width : span, :span] = seen  # where the model looks for it
        return super()._run(**inputs)
