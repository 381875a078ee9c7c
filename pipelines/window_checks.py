"""What the options and the room of a model in windows may be."""

from __future__ import annotations

from typing import Any

from torch import nn

from mmaccel.errors import OptionError
from mmaccel.pipelines.causal_lm_check import drops_cache, is_random

ATTENTIONS = ("auto", "model", "twin")


def check_options(vocab_size: int | None, full: int, stride: Any, attention: str) -> None:
    """Refuse options of a window whose head has `full` ids.

    Raises:
        OptionError: with what is allowed.
    """
    if vocab_size is not None and not 1 <= vocab_size <= full:
        raise OptionError(
            f"vocab_size: expected 1..{full}, received {vocab_size}; None keeps all {full} ids"
        )
    if stride not in ("auto", None) and int(stride) < 1:
        raise OptionError(f'stride: expected at least 1, None or "auto", received {stride}; try 64')
    check_attention(attention)


def check_attention(attention: str) -> None:
    """Refuse another attention than the three.

    Raises:
        OptionError: with what is allowed.
    """
    if attention not in ATTENTIONS:
        raise OptionError(
            f"attention: expected one of {', '.join(ATTENTIONS)}, received {attention!r}; auto "
            "takes the kernel on GPUs"
        )


def check_mode(model: nn.Module) -> None:
    """Refuse a model in training mode whose passes would not be what they are in evaluation.

    Raises:
        OptionError: it drops at random, or leaves the cache out.
    """
    received = "dropout" if is_random(model) else None
    if received is None and drops_cache(model):
        received = "gradient checkpointing, which leaves the cache out"
    if received is not None:
        raise OptionError(
            f"model: expected evaluation mode, received training mode with {received}; "
            "call model.eval()"
        )


def check_room(rows: int, positions: int, most: int | None) -> None:
    """Refuse room for nothing, or for more than `most` positions.

    Raises:
        OptionError: with what is allowed.
    """
    if rows < 1 or positions < 1:
        raise OptionError(
            f"reserve: expected at least 1 row and 1 position, received {rows} and "
            f"{positions}; ask for more"
        )
    if most is not None and positions > most:
        raise OptionError(
            f"positions: expected at most {most} (the model's max_position_embeddings), received "
            f"{positions}; shorten the prompt or ask for fewer tokens"
        )
