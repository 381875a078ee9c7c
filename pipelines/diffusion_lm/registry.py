"""Which denoiser serves a model, and what its configuration says of the denoiser's options.

Sources of the model types: the configuration classes in github.com/ML-GSAI/LLaDA and its ports,
DreamLM/Dream, JetAstra/SDAR, NVlabs/Fast-dLLM and Gen-Verse/MMaDA, read in copies of them. TraDo's
checkpoints have SDAR's files.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mmaccel.contracts import Denoiser
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
    """Name of the denoiser class that an object is, or that serves it; None for other objects.

    Some models with other code have one of the model types (LLaDA-MoE and Lumina-DiMOO: "llada").
    Their name is returned too, and the self-check in `open_denoiser` refuses them.
    """
    if isinstance(target, Denoiser):
        return type(target).__name__
    kind = getattr(getattr(unwrap(target), "config", None), "model_type", None)
    return FAMILIES.get(kind) if isinstance(kind, str) else None


def open_denoiser(target: Any) -> Denoiser:
    """The object itself if it is a denoiser, or a new denoiser around the model.

    Args:
        target: one that `find_denoiser` names.

    Raises:
        OptionError: a model in training mode, or one without a valid mask token.
        UnsupportedModelError: a model that fails the self-check of its family.
    """
    if isinstance(target, Denoiser):
        return target
    model = unwrap(target)
    models = import_module("mmaccel.pipelines.diffusion_lm.models")
    denoiser: Denoiser = getattr(models, FAMILIES[model.config.model_type])(model)
    return denoiser


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
    check_block(block)
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
