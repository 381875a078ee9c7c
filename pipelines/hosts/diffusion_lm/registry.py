"""Which denoiser serves a model.

Sources of the model types: the configuration classes of ML-GSAI/LLaDA and its ports, DreamLM/Dream,
JetAstra/SDAR (TraDo has its files), NVlabs/Fast-dLLM and Gen-Verse/MMaDA, read in copies of them.
"""

from __future__ import annotations

from typing import Any

from mmaccel.contracts import Denoiser
from mmaccel.pipelines.hosts.attach.unwrap import unwrap

FAMILIES = {  # transformers' model_type -> class in mmaccel.pipelines.hosts.diffusion_lm.models
    "llada": "LLaDADenoiser",
    "mmada": "LLaDADenoiser",
    "Dream": "DreamDenoiser",
    "sdar": "SDARDenoiser",
    "Fast_dLLM_Qwen": "FastDLLMDenoiser",
}


def find_denoiser(target: Any) -> str | None:
    """Name of the denoiser class that an object is, or of its type's; None for others.

    Models with other code of the same type (LLaDA-MoE: "llada") fail in `open_denoiser`.
    """
    if isinstance(target, Denoiser):
        return type(target).__name__
    kind = getattr(getattr(unwrap(target), "config", None), "model_type", None)
    return FAMILIES.get(kind) if isinstance(kind, str) else None


def open_denoiser(target: Any) -> Denoiser:
    """The object itself if it is a denoiser, or a new denoiser around a model."""
    if isinstance(target, Denoiser):
        return target
    from mmaccel.pipelines.hosts.diffusion_lm import models

    model = unwrap(target)
    denoiser: Denoiser = getattr(models, FAMILIES[model.config.model_type])(model)
    return denoiser
