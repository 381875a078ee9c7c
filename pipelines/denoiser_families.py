"""Diffusion models whose code comes with their checkpoints, told by their configuration.

Sources of the names: the configuration classes in github.com/ML-GSAI/LLaDA and its ports,
DreamLM/Dream, JetAstra/SDAR, NVlabs/Fast-dLLM and Gen-Verse/MMaDA, read in copies of them; TraDo's
checkpoints bring SDAR's files.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mmaccel.canvas_contracts import Denoiser
from mmaccel.pipelines.targets import unwrap

FAMILIES = {  # transformers' model_type -> class in mmaccel.pipelines.denoisers
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
    kind = getattr(import_module("mmaccel.pipelines.denoisers"), FAMILIES[model.config.model_type])
    opened: Denoiser = kind(model)
    return opened
