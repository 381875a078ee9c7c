"""GLM-Image: a small preview grid, then the large one, at positions of three axes.

Model: `GlmImageForConditionalGeneration` of transformers, the first stage of diffusers'
`GlmImagePipeline`. The positions (time, row, column) of the picture's tokens are no function of the
cache's length alone: the model computes them from the prompt and the grids when a call begins, and
keeps them. Here each call has a table of its own, so that rows may stand at different places.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.pipelines.causal_lm import CausalLM
from mmaccel.pipelines.generate_call import GenerateCall
from mmaccel.pipelines.window_model import CausalLMWindow

_KEPT = ("rope_deltas", "_cached_decode_position_ids", "_prefill_len")  # of the model, per call


class GlmImage(CausalLM):
    """`GlmImageForConditionalGeneration`; text to image."""

    name: ClassVar[str] = "glm_image"
    served: ClassVar[frozenset[str]] = frozenset({"image_grid_thw", "images_per_sample"})
    known: ClassVar[frozenset[str]] = frozenset({"prepare_inputs_for_generation"})

    def wrap(self, model: Any) -> CausalLMWindow:
        """The model in windows, all positions those of text."""
        return GlmImageWindow(model)

    def open(self, call: GenerateCall) -> CausalLMWindow:
        """The model in windows, at the positions of the call's grids."""
        return GlmImageWindow(call.model, make_positions(call))

    def obstacles(self, call: GenerateCall) -> Iterator[str]:
        """What only the original can serve."""
        grids = call.others.get("image_grid_thw")
        if grids is None or not grids.numel():
            yield "a call without image_grid_thw"
        elif call.length is not None and call.length > 1 + _positions(call)[1].shape[-1]:
            yield "more tokens than its grids have"
        if call.guidance is not None:
            yield "guidance for a model whose positions depend on the prompt"


class GlmImageWindow(CausalLMWindow):
    """The model in windows.

    Args:
        model: `GlmImageForConditionalGeneration`.
        table: `[R, 3, P]` int64 of `make_positions`; None for text.
        vocab_size: as in `CausalLMWindow`.
    """

    row_inputs = ("_table",)

    def __init__(
        self, model: Any, table: Tensor | None = None, vocab_size: int | None = None
    ) -> None:
        super().__init__(model, vocab_size=vocab_size)
        self._table = table

    def plain(self) -> CausalLMWindow:
        """As in `CausalLMWindow`, at positions of three axes."""
        window = GlmImageWindow(self.model)
        window.attention = "model"
        return window

    def begin(self, table: Tensor) -> None:
        """The next run stands at these positions."""
        self._table = table

    def make_static(self, value: Tensor) -> Tensor:
        """As in `StaticModelBuffers`, with as many positions as there is room for."""
        return self.fit(value, value[..., :1].expand(-1, -1, self._positions)).clone()

    def fit(self, own: Tensor, static: Tensor) -> Tensor:
        """A table of as many positions as another's: cut, or with its last position repeated."""
        room = static.shape[-1]
        return own[..., :room] if own.shape[-1] >= room else _lengthen(own, room)

    def position_ids(self, positions: Tensor) -> Tensor:
        """Positions `[R, W]` in the cache to `[3, R, W]`; behind the last grid, the last one's."""
        if self._table is None:
            return super().position_ids(positions).expand(3, -1, -1)
        index = positions.clamp(max=self._table.shape[-1] - 1)[:, None].expand(-1, 3, -1)
        return self._table.gather(2, index).transpose(0, 1)


def make_positions(call: GenerateCall) -> Tensor:
    """`[B, 3, P]` int64: the prompt's positions without its padding, then the grids'."""
    prompt, grids = _positions(call)
    rows = [torch.cat([prompt[:, b, m], grids[b]], 1) for b, m in enumerate(call.mask)]
    longest = max(row.shape[1] for row in rows)
    return torch.stack([_lengthen(row, longest) for row in rows])


def _positions(call: GenerateCall) -> tuple[Tensor, Tensor]:
    """Positions of the prompt `[3, B, T]` and of the grids `[B, 3, L]`, by the model's own code."""
    inner, others = call.model.model, call.others
    before = {name: getattr(inner, name) for name in _KEPT}
    try:
        prompt, _ = inner.get_rope_index(
            call.ids,
            image_grid_thw=others["image_grid_thw"],
            images_per_sample=others.get("images_per_sample"),
            attention_mask=call.mask.long(),
        )  # [3, B, T]
        return prompt, inner._cached_decode_position_ids
    finally:
        for name, value in before.items():
            setattr(inner, name, value)


def _lengthen(row: Tensor, length: int) -> Tensor:
    """`[..., 3, P]` to `[..., 3, length]` by repeating the last position."""
    behind = row[..., -1:].expand(*row.shape[:-1], length - row.shape[-1])
    return torch.cat([row, behind], -1)
