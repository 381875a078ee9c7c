"""mmaccel: the same images, clips, speech or text from several times fewer forward passes.

Attach a decoding policy to a generator that already runs; the policy documents how exact it is, and
a test proves it.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_here = os.path.dirname(__file__)
# In a checkout kernels/, samplers/, pipelines/ and tokenizers_vq/ lie next to this folder.
if not os.path.isdir(os.path.join(_here, "kernels")):
    __path__.append(os.path.dirname(_here))

from mmaccel.catalog import METHODS  # noqa: E402

# Public name -> module that defines it. A name is imported at its first use, so that
# `import mmaccel` imports no torch. Classes of methods are added from the catalog.
# Type checkers read `__init__.pyi`, which scripts/update_docs.py writes.
_PUBLIC = {
    "CachePlan": "mmaccel.samplers.canvas.cache_plan",
    "Coarse": "mmaccel.samplers.drafting.coarse",
    "Eagle": "mmaccel.samplers.drafting.heads.eagle",
    "TokenRecycling": "mmaccel.samplers.drafting.token_recycling",
    "HierarchyDrafting": "mmaccel.samplers.drafting.hierarchy",
    "Lookahead": "mmaccel.samplers.drafting.memory.lookahead",
    "STAND": "mmaccel.samplers.drafting.memory.stand",
    "ADED": "mmaccel.samplers.drafting.memory.aded",
    "SiblingRows": "mmaccel.samplers.drafting.memory.sibling_rows",
    "SourceText": "mmaccel.samplers.drafting.memory.source_text",
    "SourceImage": "mmaccel.samplers.drafting.memory.source_image",
    "BanditSpec": "mmaccel.samplers.drafting.bandit_spec",
    "DraftModel": "mmaccel.samplers.drafting.draft_model",
    "DFlash": "mmaccel.samplers.drafting.parallel.dflash",
    "MTP": "mmaccel.samplers.drafting.heads.mtp",
    "OwnCanvas": "mmaccel.samplers.drafting.parallel.own_canvas",
    "Pard": "mmaccel.samplers.drafting.parallel.pard",
    "frequent_ids": "mmaccel.samplers.drafting.shared_ids",
    "share_ids": "mmaccel.pipelines.hosts.causal_lm.shared_ids",
    "trim_vocabulary": "mmaccel.pipelines.hosts.causal_lm.shared_ids",
    "SVIP": "mmaccel.samplers.drafting.lengths.svip",
    "SpecDecPP": "mmaccel.samplers.drafting.lengths.specdec_pp",
    "DISCO": "mmaccel.samplers.drafting.lengths.disco",
    "SelfDraft": "mmaccel.samplers.drafting.self_draft",
    "TriForce": "mmaccel.samplers.drafting.triforce",
    "Vegas": "mmaccel.samplers.drafting.vegas",
    "CacheMethod": "mmaccel.reduction.kv_cache.contract",
    "CacheQuantizer": "mmaccel.reduction.kv_cache.contract",
    "CachedLayer": "mmaccel.reduction.kv_cache.contract",
    "AttentionMethod": "mmaccel.reduction.sparse_attention.contract",
    "BlockScorer": "mmaccel.reduction.sparse_attention.contract",
    "LayerBlocks": "mmaccel.reduction.sparse_attention.contract",
    "PromptMethod": "mmaccel.reduction.sparse_attention.contract",
    "PromptBlocks": "mmaccel.reduction.sparse_attention.contract",
    "SamplingParams": "mmaccel.samplers.sampling_params",
    "Noise": "mmaccel.samplers.noise",
    "Grid": "mmaccel.tokenizers_vq.grid",
    "Frames": "mmaccel.tokenizers_vq.frames",
    "RepetitionAwareSampling": "mmaccel.pipelines.hosts.logits.repetition",
    "WindowedRepetitionPenalty": "mmaccel.pipelines.hosts.logits.repetition",
    "FrustratinglySimple": "mmaccel.pipelines.hosts.logits.frustratingly_simple",
    "TopNSigma": "mmaccel.pipelines.hosts.logits.position_rules",
    "EntropyTemperature": "mmaccel.pipelines.hosts.logits.position_rules",
    "TextToImage": "mmaccel.pipelines.text_to_image.pipeline",
    "TextToSpeech": "mmaccel.pipelines.text_to_speech.pipeline",
    "ImageToText": "mmaccel.pipelines.image_to_text.pipeline",
    "ImageToVideo": "mmaccel.pipelines.image_to_video.pipeline",
    "TextToVideo": "mmaccel.pipelines.text_to_video.pipeline",
    "Answer": "mmaccel.pipelines.image_to_text.types",
    "Answers": "mmaccel.pipelines.image_to_text.types",
    "Clip": "mmaccel.pipelines.image_to_video.types",
    "Clips": "mmaccel.pipelines.image_to_video.types",
    "Speech": "mmaccel.pipelines.text_to_speech.types",
    "SpeechChunk": "mmaccel.pipelines.text_to_speech.types",
    "SpeechStream": "mmaccel.pipelines.text_to_speech.streaming",
    "Utterance": "mmaccel.pipelines.text_to_speech.types",
    "Request": "mmaccel.pipelines.text_to_image.outputs",
    "RequestOutput": "mmaccel.pipelines.text_to_image.outputs",
    "CausalLMWindow": "mmaccel.pipelines.hosts.causal_lm.model",
    "CachedBlocks": "mmaccel.pipelines.hosts.diffusion_lm.llada2.block_cache",
    "attach": "mmaccel.handle",
    "decoder": "mmaccel.custom_generate",
    "detach": "mmaccel.handle",
    "load_demo": "mmaccel.demo.loading",
    "supports": "mmaccel.handle",
    "stateless": "mmaccel.pipelines.hosts.logits.processor_support",
    "Handle": "mmaccel.pipelines.hosts.attach.handle",
    "TokenModel": "mmaccel.contracts",
    "VisualTokenizer": "mmaccel.contracts",
    "Policy": "mmaccel.policies",
    "Prompt": "mmaccel.contracts",
    "ContinuousBatching": "mmaccel.contracts",
    "PrefixTree": "mmaccel.samplers.prefix_tree",
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


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mmaccel' has no attribute {name!r}; see dir(mmaccel)")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
