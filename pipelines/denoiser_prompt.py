"""Prompts of a denoiser's call: ids and masks of a tokenizer, as rows of a canvas run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.canvas_contracts import Denoiser
from mmaccel.errors import OptionError, ShapeError


@dataclass(frozen=True)
class Rows:
    """Rows of ids, padded on any side.

    Attributes:
        ids: `[B, T]` int64.
        mask: `[B, T]`, 1 on tokens and 0 on padding; None where there is none.
        name, mask_name: of the arguments they came as.

    Raises:
        ShapeError: something else, or a row without a token.
        OptionError: a mask of other numbers.
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

        if mask is not None:
            self._check_mask(mask)

    @property
    def is_token(self) -> Tensor:
        """`[B, T]` bool, False on padding."""
        if self.mask is None:
            return torch.ones_like(self.ids, dtype=torch.bool)
        return self.mask.to(self.ids.device).bool()

    def check(self, n_ids: int | None, mask_token: int | None) -> None:
        """Refuse what is no token of a model's prompt; padding may be any number.

        Args:
            n_ids: ids that the model knows, or None.
            mask_token: its id of an open slot, or None.

        Raises:
            OptionError: an id out of its range, or the mask token.
        """
        ids, remedy = self.ids.to(torch.int64), "take those of the model's own tokenizer"
        self._refuse(ids < 0, "ids from 0 on", remedy)
        if n_ids is not None:
            self._refuse(ids >= n_ids, f"ids below {n_ids}", remedy)
        if mask_token is not None:
            remedy = "leave open slots to the canvas, and give known ones by a layout"
            self._refuse(ids == mask_token, "no mask token", remedy)

    def packed(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens `[B, T]` with what counts first, and how many count, `[B]`."""
        ids, is_token = self.ids.to(device, torch.int64), self.is_token.to(device)
        order = (~is_token).int().argsort(dim=1, stable=True)
        return ids.gather(1, order), is_token.sum(1)

    def _check_mask(self, mask: Tensor) -> None:
        is_sound = (mask == 0) | (mask == 1)
        if not bool(is_sound.all()):
            raise OptionError(
                f"{self.mask_name}: expected 1 on tokens and 0 on padding, received "
                f"{mask[~is_sound][0].item()}; take the one of the tokenizer, not scores to add"
            )
        is_empty = ~mask.bool().any(1)
        if bool(is_empty.any()):
            raise ShapeError(
                f"{self.name}: expected at least one token in every row, received padding alone in "
                f"row {int(is_empty.nonzero()[0])} by {self.mask_name}; begin it with a token"
            )

    def _refuse(self, is_wrong: Tensor, expected: str, remedy: str) -> None:
        found = (is_wrong & self.is_token).nonzero().tolist()
        if found:
            row, column = found[0]
            raise OptionError(
                f"{self.name}: expected {expected}, received id {int(self.ids[row, column])} in "
                f"row {row}; {remedy}"
            )


def negative_rows(ids: Tensor | None, mask: Tensor | None) -> Rows | None:
    """The second branch's, if there is one.

    Raises:
        ShapeError: see `Rows`.
        OptionError: see `Rows`, or a mask of no prompts.
    """
    if ids is None:
        if mask is not None:
            raise OptionError(
                "negative_prompt_attention_mask: expected negative_prompt_ids beside it, received "
                "it alone; give both, or none"
            )
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


def trim(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Packed rows without the columns that are padding in all of them."""
    return tokens[:, : int(lengths.max())]


def own_mask_token(denoiser: Denoiser) -> int | None:
    """The id of an open slot as prompts have it, in the model's own numbering; None for none."""
    mask_token = denoiser.mask_token
    if mask_token is None or not hasattr(denoiser, "to_model"):
        return mask_token
    return int(denoiser.to_model(torch.tensor(mask_token)))
