"""What the configuration of a model says of the options of its denoiser."""

from __future__ import annotations

from typing import Any

from mmaccel.checks import check_int
from mmaccel.errors import OptionError


def check_options(shift: int, block: int | None, mask_token: int | None, n_ids: int) -> None:
    """Refuse options of a denoiser whose model has `n_ids` ids.

    Raises:
        OptionError: with what is allowed.
    """
    if shift not in (0, 1):
        raise OptionError(
            f"shift: expected 0 or 1, received {shift!r}; 1 where logits are those of the next "
            "position"
        )
    if block is not None:
        check_int("block", block, 1, hint="leave it out for the model's own")
    if mask_token is not None and not 0 <= mask_token < n_ids:
        raise OptionError(
            f"mask_token: expected an id in 0..{n_ids - 1}, received {mask_token}; see the "
            "tokenizer's mask_token_id, or None for uniform corruption"
        )


def find_mask_token(model: Any, mask_token: int | None, default: int | None) -> int:
    """The id of an open slot: the one given, the configuration's, or the family's default.

    Raises:
        OptionError: there is none of these.
    """
    if mask_token is None:
        own = getattr(model.config, "mask_token_id", None)
        mask_token = default if own is None else own
    if mask_token is None:
        raise OptionError(
            "mask_token: expected an id, received None, and the model's configuration has no "
            "mask_token_id; give the denoiser the tokenizer's"
        )
    return mask_token


def find_max_positions(config: Any) -> int | None:
    """Positions of the model, or None where its configuration does not say."""
    for name in ("max_position_embeddings", "max_sequence_length"):
        count = getattr(config, name, None)
        if count is not None:
            return int(count)
    return None
