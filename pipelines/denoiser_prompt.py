"""Prompts of a denoiser's call: ids and masks of a tokenizer, as rows of a canvas run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.errors import ShapeError


@dataclass(frozen=True)
class Rows:
    """Rows of ids, padded on any side.

    Attributes:
        ids: `[B, T]` int64.
        mask: `[B, T]`, 0 on padding; None where there is none.
        name, mask_name: of the arguments they came as.

    Raises:
        ShapeError: something else.
    """

    ids: Tensor
    mask: Tensor | None = None
    name: str = "input_ids"
    mask_name: str = "attention_mask"

    def __post_init__(self) -> None:
        ids, mask = self.ids, self.mask
        is_sound = isinstance(ids, Tensor) and ids.ndim == 2 and ids.numel() > 0
        if not is_sound or ids.is_floating_point() or ids.dtype == torch.bool:
            shown = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else repr(ids)
            raise ShapeError(
                f"{self.name}: expected int64 [B, T] with a token in it, received {shown}; "
                "take the tokenizer's input_ids"
            )
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
            shown = str(list(mask.shape)) if isinstance(mask, Tensor) else repr(mask)
            raise ShapeError(
                f"{self.mask_name}: expected {list(ids.shape)}, received {shown}; take the one of "
                "the tokenizer, or None where nothing is padded"
            )

    def packed(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens `[B, T]` with what counts first, and how many count, `[B]`."""
        ids = self.ids.to(device, torch.int64)
        mask = torch.ones_like(ids) if self.mask is None else self.mask.to(ids.device)
        mask = mask.bool()
        order = (~mask).int().argsort(dim=1, stable=True)
        return ids.gather(1, order), mask.sum(1)


def negative_rows(ids: Tensor | None, mask: Tensor | None) -> Rows | None:
    """The second branch's, if there is one.

    Raises:
        ShapeError: see `Rows`.
    """
    if ids is None:
        return None
    return Rows(ids, mask, "negative_prompt_ids", "negative_prompt_attention_mask")


def join(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two branches of a prompt, the second behind the first; one row of it is for all.

    Raises:
        ShapeError: another number of rows.
    """
    batch, wide = first[0].shape
    if second[0].shape[0] == 1:
        second = second[0].expand(batch, -1), second[1].expand(batch)
    if second[0].shape[0] != batch:
        raise ShapeError(
            f"negative_prompt_ids: expected {batch} rows or one for all, received "
            f"{second[0].shape[0]}; give one for each row of input_ids"
        )
    widest = max(wide, second[0].shape[1])
    rows = [torch.nn.functional.pad(t, (0, widest - t.shape[1])) for t in (first[0], second[0])]
    return torch.cat(rows), torch.cat([first[1], second[1]])
