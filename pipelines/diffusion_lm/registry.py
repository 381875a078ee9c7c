"""Diffusion models whose code comes with their checkpoints, told by their configuration.

Sources of the names: the configuration classes in github.com/ML-GSAI/LLaDA and its ports,
DreamLM/Dream, JetAstra/SDAR, NVlabs/Fast-dLLM and Gen-Verse/MMaDA, read in copies of them; TraDo's
checkpoints bring SDAR's files.

What the options of a denoiser may be, and what a model's configuration says of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mmaccel.canvas_contracts import Denoiser
from mmaccel.errors import OptionError
from mmaccel.pipelines.attach.unwrap import unwrap
from mmaccel.samplers.canvas.checks import check_block

FAMILIES = {  # transformers' model_type -> class in mmaccel.pipelines.diffusion_lm.models
    "llada": "LLaDADenoiser",
    "mmada": "LLaDADenoiser",
    "Dream": "DreamDenoiser",
    "sdar": "SDARDenoiser",
    "Fast_dLLM_Qwen": "FastDLLMDenoiser",
}


def find_denoiser(target: Any) -> str | None:
    """The class of the denoiser that an object is, or that it is served through; None for others.

    Some models of other code bear one of the names (LLaDA-MoE and Lumina-DiMOO: "llada"); they are
    found here, and `open_denoiser` tells by a self-check.
    """
    if isinstance(target, Denoiser):
        return type(target).__name__
    kind = getattr(getattr(unwrap(target), "config", None), "model_type", None)
    return FAMILIES.get(kind) if isinstance(kind, str) else None


def open_denoiser(target: Any) -> Denoiser:
    """The denoiser an object is, or one around the model it is.

    Args:
        target: what `find_denoiser` knows.

    Raises:
        OptionError: a model in training mode, or one that names no mask token, or no possible one.
        UnsupportedModelError: a model that does not go by what its family goes by.
    """
    if isinstance(target, Denoiser):
        return target
    model = unwrap(target)
    kind = getattr(
        import_module("mmaccel.pipelines.diffusion_lm.models"), FAMILIES[model.config.model_type]
    )
    opened: Denoiser = kind(model)
    return opened


def check_options(shift: int, block: int | None, mask_token: int | None, n_ids: int) -> None:
    """Refuse options of a denoiser whose model knows `n_ids` ids.

    Raises:
        OptionError: with what is allowed.
    """
    if shift not in (0, 1):
        raise OptionError(
            f"shift: expected 0 or 1, received {shift!r}; 1 where logits are those of the next "
            "position"
        )
    check_block(block)
    if mask_token is not None and not 0 <= mask_token < n_ids:
        raise OptionError(
            f"mask_token: expected an id in 0..{n_ids - 1}, received {mask_token}; see the "
            "tokenizer's mask_token_id, or None for uniform corruption"
        )


def find_mask_token(model: Any, mask_token: int | None, usual: int | None) -> int:
    """The id of an open slot: the one given, the configuration's, or what the family published.

    Raises:
        OptionError: none of these.
    """
    if mask_token is None:
        own = getattr(model.config, "mask_token_id", None)
        mask_token = usual if own is None else own
    if mask_token is None:
        raise OptionError(
            "mask_token: expected an id, received None, and the model's configuration has no "
            "mask_token_id; give the denoiser the tokenizer's"
        )
    return mask_token


def find_most(config: Any) -> int | None:
    """Positions the model was made for, if its configuration says so."""
    for name in ("max_position_embeddings", "max_sequence_length"):
        most = getattr(config, name, None)
        if most is not None:
            return int(most)
    return None
