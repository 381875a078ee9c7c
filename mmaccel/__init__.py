"""mmaccel: the same images, clips, speech or text from several times fewer forward passes.

Attach a decoding policy to a generator that already runs; the policy documents how exact it is, and
a test proves it.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_here = os.path.dirname(__file__)
# In a checkout kernels/, samplers/, pipelines/ and tokenizers_vq/ lie next to this folder.
if not os.path.isdir(os.path.join(_here, "kernels")):
    __path__.append(os.path.dirname(_here))

from mmaccel.catalog import METHODS  # noqa: E402

# Public name -> module that defines it. A name is imported at its first use, so that
# `import mmaccel` imports no torch. Classes of methods are added from the catalog.
_PUBLIC = {
    "CachePlan": "mmaccel.samplers.canvas.cache_plan",
    "Coarse": "mmaccel.samplers.drafting.coarse",
    "TokenRecycling": "mmaccel.samplers.drafting.token_recycling",
    "HierarchyDrafting": "mmaccel.samplers.drafting.hierarchy",
    "SelfDraft": "mmaccel.samplers.drafting.self_draft",
    "TriForce": "mmaccel.samplers.drafting.triforce",
    "Vegas": "mmaccel.samplers.drafting.vegas",
    "CacheMethod": "mmaccel.reduction.kv_cache.contract",
    "CachedLayer": "mmaccel.reduction.kv_cache.contract",
    "AttentionMethod": "mmaccel.reduction.sparse_attention.contract",
    "SamplingParams": "mmaccel.samplers.sampling_params",
    "Noise": "mmaccel.samplers.noise",
    "Grid": "mmaccel.tokenizers_vq.grid",
    "Frames": "mmaccel.tokenizers_vq.frames",
    "RepetitionAwareSampling": "mmaccel.pipelines.logits.repetition",
    "WindowedRepetitionPenalty": "mmaccel.pipelines.logits.repetition",
    "TextToImage": "mmaccel.pipelines.text_to_image.pipeline",
    "TextToSpeech": "mmaccel.pipelines.text_to_speech.pipeline",
    "ImageToText": "mmaccel.pipelines.image_to_text.pipeline",
    "ImageToVideo": "mmaccel.pipelines.image_to_video.pipeline",
    "Answer": "mmaccel.pipelines.image_to_text.types",
    "Answers": "mmaccel.pipelines.image_to_text.types",
    "Clip": "mmaccel.pipelines.image_to_video.types",
    "Clips": "mmaccel.pipelines.image_to_video.types",
    "Speech": "mmaccel.pipelines.text_to_speech.types",
    "Utterance": "mmaccel.pipelines.text_to_speech.types",
    "Request": "mmaccel.pipelines.text_to_image.outputs",
    "RequestOutput": "mmaccel.pipelines.text_to_image.outputs",
    "CausalLMWindow": "mmaccel.pipelines.causal_lm.model",
    "CachedBlocks": "mmaccel.pipelines.diffusion_lm.llada2.block_cache",
    "attach": "mmaccel.handle",
    "decoder": "mmaccel.custom_generate",
    "detach": "mmaccel.handle",
    "load_demo": "mmaccel.demo.vision",
    "plan_visual_tokens": "mmaccel.evaluation.visual_tokens.planner",
    "VisualTokenPlan": "mmaccel.evaluation.visual_tokens.planner",
    "supports": "mmaccel.handle",
    "stateless": "mmaccel.pipelines.logits.processor_support",
    "Handle": "mmaccel.handle",
    "TokenModel": "mmaccel.contracts",
    "VisualTokenizer": "mmaccel.contracts",
    "Policy": "mmaccel.contracts",
    "Prompt": "mmaccel.contracts",
    "ContinuousBatching": "mmaccel.contracts",
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

for _slot, _entries in METHODS.items():
    if _slot != "drafts":  # most sources are given by name alone
        _PUBLIC |= {entry.class_name: entry.module for entry in _entries.values()}

__all__ = ["__version__", *sorted(_PUBLIC)]  # noqa: PLE0604

if TYPE_CHECKING:
    from mmaccel.contracts import ContinuousBatching, Policy, Prompt, TokenModel, VisualTokenizer
    from mmaccel.custom_generate import decoder
    from mmaccel.demo.vision import load_demo
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
    from mmaccel.evaluation.visual_tokens.planner import VisualTokenPlan, plan_visual_tokens
    from mmaccel.handle import Handle, attach, detach, supports
    from mmaccel.pipelines.causal_lm.model import CausalLMWindow
    from mmaccel.pipelines.diffusion_lm.llada2.block_cache import CachedBlocks
    from mmaccel.pipelines.image_to_text.pipeline import ImageToText
    from mmaccel.pipelines.image_to_text.types import Answer, Answers
    from mmaccel.pipelines.image_to_video.pipeline import ImageToVideo
    from mmaccel.pipelines.image_to_video.types import Clip, Clips
    from mmaccel.pipelines.logits.processor_support import stateless
    from mmaccel.pipelines.logits.repetition import (
        RepetitionAwareSampling,
        WindowedRepetitionPenalty,
    )
    from mmaccel.pipelines.text_to_image.outputs import Request, RequestOutput
    from mmaccel.pipelines.text_to_image.pipeline import TextToImage
    from mmaccel.pipelines.text_to_speech.pipeline import TextToSpeech
    from mmaccel.pipelines.text_to_speech.types import Speech, Utterance
    from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod
    from mmaccel.reduction.kv_cache.snapkv import SnapKV
    from mmaccel.reduction.kv_cache.streaming_llm import StreamingLLM
    from mmaccel.reduction.sparse_attention.contract import AttentionMethod
    from mmaccel.reduction.sparse_attention.dhsa import DHSA
    from mmaccel.reduction.sparse_attention.quest import Quest
    from mmaccel.reduction.visual_tokens.cdpruner import CDPruner
    from mmaccel.reduction.visual_tokens.dart import DART
    from mmaccel.reduction.visual_tokens.divprune import DivPrune
    from mmaccel.reduction.visual_tokens.downsample import Downsample
    from mmaccel.reduction.visual_tokens.downsample_pixels import DownsamplePixels
    from mmaccel.reduction.visual_tokens.evs import EVS
    from mmaccel.reduction.visual_tokens.fastv import FastV
    from mmaccel.reduction.visual_tokens.ficoco import FiCoCoL, FiCoCoV
    from mmaccel.reduction.visual_tokens.hired import HiRED
    from mmaccel.reduction.visual_tokens.ilre import ILRe
    from mmaccel.reduction.visual_tokens.lazy_llm import LazyLLM
    from mmaccel.reduction.visual_tokens.pyramid_drop import PyramidDrop
    from mmaccel.reduction.visual_tokens.random_tokens import RandomTokens
    from mmaccel.reduction.visual_tokens.tome import ToMe
    from mmaccel.reduction.visual_tokens.uniform_tokens import UniformTokens
    from mmaccel.reduction.visual_tokens.vidcom2 import VidCom2
    from mmaccel.reduction.visual_tokens.visionzip import VisionZip
    from mmaccel.results import Generation, Progress, Stats
    from mmaccel.samplers.canvas.adaptive_block import AdaptiveBlock
    from mmaccel.samplers.canvas.cache_plan import CachePlan
    from mmaccel.samplers.canvas.confident_parallel import ConfidentParallel
    from mmaccel.samplers.canvas.entropy_bounded import EntropyBounded
    from mmaccel.samplers.canvas.kl_stable import KLStable
    from mmaccel.samplers.canvas.local_leap import LocalLeap
    from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
    from mmaccel.samplers.canvas.masked_parallel import MaskedParallel
    from mmaccel.samplers.canvas.revised_parallel import RevisedParallel
    from mmaccel.samplers.canvas.stepwise import Stepwise
    from mmaccel.samplers.drafting.coarse import Coarse
    from mmaccel.samplers.drafting.hierarchy import HierarchyDrafting
    from mmaccel.samplers.drafting.self_draft import SelfDraft
    from mmaccel.samplers.drafting.token_recycling import TokenRecycling
    from mmaccel.samplers.drafting.triforce import TriForce
    from mmaccel.samplers.drafting.vegas import Vegas
    from mmaccel.samplers.noise import Noise
    from mmaccel.samplers.sampling_params import SamplingParams
    from mmaccel.samplers.trees.comb import Comb
    from mmaccel.samplers.trees.dyspec import DySpec
    from mmaccel.samplers.trees.sequoia import Sequoia
    from mmaccel.samplers.window.autoregressive import Autoregressive
    from mmaccel.samplers.window.grouped_speculative import GroupedSpeculative
    from mmaccel.samplers.window.jacobi import Jacobi
    from mmaccel.samplers.window.speculative import Speculative
    from mmaccel.samplers.window.speculative_jacobi import SpeculativeJacobi
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
