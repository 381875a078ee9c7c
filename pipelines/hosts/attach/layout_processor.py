"""A layout as logits processors of transformers, and checks of its vocabulary. The mask acts where
`prefix_allowed_tokens_fn` does: after guidance, before temperature, top-k and top-p.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmaccel.checks import show
from mmaccel.contracts import Layout
from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.logits.processor_support import is_own

_GUIDANCE = (
    "ClassifierFreeGuidanceLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
)
_NEVER = float("-inf")


class LayoutMask:
    """A logits processor that masks what a layout does not allow at the current slot.

    Args:
        n_prompt: T, prompt tokens of a row as transformers has them, padding included.
        is_last: whether it only makes forced tokens survive what other processors masked.
    """

    def __init__(self, layout: Layout, n_prompt: int, is_last: bool) -> None:
        self._layout, self._n_prompt, self._is_last = layout, n_prompt, is_last

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Ids `[B, T + slot]` and scores `[B, V]` to scores `[B, V]`."""
        slots = input_ids.new_tensor([[input_ids.shape[1] - self._n_prompt]])  # of all rows
        forced = self._layout.forced(slots)
        if forced is not None and int(forced) >= 0:
            token = int(forced)
            kept = torch.full_like(scores, _NEVER)
            kept[:, token] = scores[:, token]
            if self._is_last:
                lost = ~kept[:, token].isfinite()  # otherwise its score counts, for beams
                kept[lost, token] = 0.0
            return kept
        allowed = None if self._is_last else self._layout.allowed(slots)
        if allowed is None:
            return scores
        mask = allowed.to(scores.device).broadcast_to(1, 1, scores.shape[-1])[0]
        return scores.masked_fill(~mask, _NEVER)


def with_layout(processors: Any, layout: Layout, n_prompt: int) -> Any:
    """A new `LogitsProcessorList` with a layout's processors in it."""
    first = 0
    for index, processor in enumerate(processors):
        if any(is_own(processor, name) for name in _GUIDANCE):
            first = index + 1
    mask, last = (LayoutMask(layout, n_prompt, is_last) for is_last in (False, True))
    return type(processors)([*processors[:first], mask, *processors[first:], last])


def check_layout(layout: Any, n_ids: int | None = None) -> None:
    """Refuse an object that is no layout, or is one of another vocabulary than `n_ids`."""
    if layout is None:
        return
    if isinstance(layout, type) or not isinstance(layout, Layout):
        raise OptionError(
            f"layout: expected one such as mmaccel.Frames or mmaccel.Grid, received "
            f"{show(layout)}; leave it out where nothing is known about the slots"
        )
    allowed = layout.allowed(torch.zeros(1, 1, dtype=torch.int64, device="cpu"))
    size = getattr(layout, "vocab_size", None if allowed is None else allowed.shape[-1])
    if None not in (size, n_ids) and size != n_ids:
        raise OptionError(
            f"layout: expected the model's {n_ids} ids, received a layout of {size}; "
            f"give it vocab_size={n_ids}"
        )


def count_ids(model: Any) -> int | None:
    """V of a model's logits; None where its head has no weight."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    shape = getattr(weight, "shape", None)  # quantised heads have a method of that name
    return None if shape is None else int(shape[0])
