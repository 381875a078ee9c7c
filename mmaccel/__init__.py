"""mmaccel: the same images, clips, speech or text from several times fewer forward passes.

Attach a decoding policy to a generator that already runs; the policy says in writing how exact it
is.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_here = os.path.dirname(__file__)
# In a checkout the floors stand beside this folder, not in it.
if not os.path.isdir(os.path.join(_here, "kernels")):
    __path__.append(os.path.dirname(_here))

# Public name -> module that defines it. Nothing is imported before it is asked for, so that
# `import mmaccel` needs no torch.
_PUBLIC = {
    "Autoregressive": "mmaccel.samplers.autoregressive",
    "Jacobi": "mmaccel.samplers.jacobi",
    "SpeculativeJacobi": "mmaccel.samplers.speculative_jacobi",
    "Speculative": "mmaccel.samplers.speculative",
    "GroupedSpeculative": "mmaccel.samplers.grouped_speculative",
    "Stepwise": "mmaccel.samplers.stepwise",
    "LosslessUnmask": "mmaccel.samplers.lossless_unmask",
    "EntropyBounded": "mmaccel.samplers.entropy_bounded",
    "ConfidentParallel": "mmaccel.samplers.confident_parallel",
    "KLStable": "mmaccel.samplers.kl_stable",
    "LocalLeap": "mmaccel.samplers.local_leap",
    "AdaptiveBlock": "mmaccel.samplers.adaptive_block",
    "RevisedParallel": "mmaccel.samplers.revised_parallel",
    "MaskedParallel": "mmaccel.samplers.masked_parallel",
    "CachePlan": "mmaccel.samplers.cache_plan",
    "Filters": "mmaccel.samplers.filters",
    "Noise": "mmaccel.samplers.noise",
    "Grid": "mmaccel.tokenizers_vq.grid",
    "Frames": "mmaccel.tokenizers_vq.frames",
    "RepetitionAwareSampling": "mmaccel.pipelines.repetition_aware",
    "WindowedRepetitionPenalty": "mmaccel.pipelines.repetition_penalty",
    "TextToImage": "mmaccel.pipelines.text_to_image",
    "TextToSpeech": "mmaccel.pipelines.text_to_speech",
    "ImageToVideo": "mmaccel.pipelines.image_to_video",
    "Clip": "mmaccel.pipelines.video",
    "Clips": "mmaccel.pipelines.video",
    "Speech": "mmaccel.pipelines.speech",
    "Utterance": "mmaccel.pipelines.speech",
    "Request": "mmaccel.pipelines.picture_request",
    "RequestOutput": "mmaccel.pipelines.picture_request",
    "CausalLMWindow": "mmaccel.pipelines.window_model",
    "CachedBlocks": "mmaccel.pipelines.cached_blocks",
    "attach": "mmaccel.handle",
    "decoder": "mmaccel.custom_generate",
    "supports": "mmaccel.handle",
    "stateless": "mmaccel.pipelines.processor_kinds",
    "Handle": "mmaccel.handle",
    "TokenModel": "mmaccel.contracts",
    "VisualTokenizer": "mmaccel.contracts",
    "Policy": "mmaccel.contracts",
    "Prompt": "mmaccel.contracts",
    "Places": "mmaccel.places",
    "Generation": "mmaccel.results",
    "Progress": "mmaccel.results",
    "Stats": "mmaccel.results",
    "MMAccelError": "mmaccel.errors",
    "ShapeError": "mmaccel.errors",
    "OptionError": "mmaccel.errors",
    "UnsupportedModelError": "mmaccel.errors",
    "MissingBackendError": "mmaccel.errors",
    "AttachError": "mmaccel.errors",
    "BusyError": "mmaccel.errors",
    "NumericsError": "mmaccel.errors",
}

__all__ = ["__version__", *sorted(_PUBLIC)]  # noqa: PLE0604

if TYPE_CHECKING:
    from mmaccel.contracts import Policy, Prompt, TokenModel, VisualTokenizer
    from mmaccel.custom_generate import decoder
    from mmaccel.errors import (
        AttachError,
        BusyError,
        MissingBackendError,
        MMAccelError,
        NumericsError,
        OptionError,
        ShapeError,
        UnsupportedModelError,
    )
    from mmaccel.handle import Handle, attach, supports
    from mmaccel.pipelines.cached_blocks import CachedBlocks
    from mmaccel.pipelines.image_to_video import ImageToVideo
    from mmaccel.pipelines.picture_request import Request, RequestOutput
    from mmaccel.pipelines.processor_kinds import stateless
    from mmaccel.pipelines.repetition_aware import RepetitionAwareSampling
    from mmaccel.pipelines.repetition_penalty import WindowedRepetitionPenalty
    from mmaccel.pipelines.speech import Speech, Utterance
    from mmaccel.pipelines.text_to_image import TextToImage
    from mmaccel.pipelines.text_to_speech import TextToSpeech
    from mmaccel.pipelines.video import Clip, Clips
    from mmaccel.pipelines.window_model import CausalLMWindow
    from mmaccel.places import Places
    from mmaccel.results import Generation, Progress, Stats
    from mmaccel.samplers.adaptive_block import AdaptiveBlock
    from mmaccel.samplers.autoregressive import Autoregressive
    from mmaccel.samplers.cache_plan import CachePlan
    from mmaccel.samplers.confident_parallel import ConfidentParallel
    from mmaccel.samplers.entropy_bounded import EntropyBounded
    from mmaccel.samplers.filters import Filters
    from mmaccel.samplers.grouped_speculative import GroupedSpeculative
    from mmaccel.samplers.jacobi import Jacobi
    from mmaccel.samplers.kl_stable import KLStable
    from mmaccel.samplers.local_leap import LocalLeap
    from mmaccel.samplers.lossless_unmask import LosslessUnmask
    from mmaccel.samplers.masked_parallel import MaskedParallel
    from mmaccel.samplers.noise import Noise
    from mmaccel.samplers.revised_parallel import RevisedParallel
    from mmaccel.samplers.speculative import Speculative
    from mmaccel.samplers.speculative_jacobi import SpeculativeJacobi
    from mmaccel.samplers.stepwise import Stepwise
    from mmaccel.tokenizers_vq.frames import Frames
    from mmaccel.tokenizers_vq.grid import Grid


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mmaccel' has no attribute {name!r}; see dir(mmaccel)")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
