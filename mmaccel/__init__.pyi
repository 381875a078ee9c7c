"""The public names for type checkers, written by scripts/update_docs.py."""

from mmaccel.contracts import ContinuousBatching
from mmaccel.contracts import Prompt
from mmaccel.contracts import TokenModel
from mmaccel.contracts import VisualTokenizer
from mmaccel.custom_generate import decoder
from mmaccel.demo.loading import load_demo
from mmaccel.errors import AttachError
from mmaccel.errors import BusyError
from mmaccel.errors import MMAccelError
from mmaccel.errors import MissingBackendError
from mmaccel.errors import NumericsError
from mmaccel.errors import OptionError
from mmaccel.errors import ShapeError
from mmaccel.errors import UnsupportedModelError
from mmaccel.handle import attach
from mmaccel.handle import detach
from mmaccel.handle import supports
from mmaccel.pipelines.hosts.attach.handle import Handle
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.causal_lm.shared_ids import share_ids
from mmaccel.pipelines.hosts.causal_lm.shared_ids import trim_vocabulary
from mmaccel.pipelines.hosts.diffusion_lm.llada2.block_cache import CachedBlocks
from mmaccel.pipelines.hosts.logits.frustratingly_simple import FrustratinglySimple
from mmaccel.pipelines.hosts.logits.position_rules import EntropyTemperature
from mmaccel.pipelines.hosts.logits.position_rules import TopNSigma
from mmaccel.pipelines.hosts.logits.processor_support import stateless
from mmaccel.pipelines.hosts.logits.repetition import RepetitionAwareSampling
from mmaccel.pipelines.hosts.logits.repetition import WindowedRepetitionPenalty
from mmaccel.pipelines.image_to_text.pipeline import ImageToText
from mmaccel.pipelines.image_to_text.types import Answer
from mmaccel.pipelines.image_to_text.types import Answers
from mmaccel.pipelines.image_to_video.pipeline import ImageToVideo
from mmaccel.pipelines.image_to_video.types import Clip
from mmaccel.pipelines.image_to_video.types import Clips
from mmaccel.pipelines.text_to_image.outputs import Request
from mmaccel.pipelines.text_to_image.outputs import RequestOutput
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from mmaccel.pipelines.text_to_speech.pipeline import TextToSpeech
from mmaccel.pipelines.text_to_speech.streaming import SpeechStream
from mmaccel.pipelines.text_to_speech.types import Speech
from mmaccel.pipelines.text_to_speech.types import SpeechChunk
from mmaccel.pipelines.text_to_speech.types import Utterance
from mmaccel.pipelines.text_to_video.pipeline import TextToVideo
from mmaccel.policies import Policy
from mmaccel.reduction.kv_cache.bilevelkv import BiLevelKV
from mmaccel.reduction.kv_cache.chelsea import Chelsea
from mmaccel.reduction.kv_cache.chunkkv import ChunkKV
from mmaccel.reduction.kv_cache.citrus import CItruS
from mmaccel.reduction.kv_cache.contract import CacheMethod
from mmaccel.reduction.kv_cache.contract import CacheQuantizer
from mmaccel.reduction.kv_cache.contract import CachedLayer
from mmaccel.reduction.kv_cache.duo_attention import DuoAttention
from mmaccel.reduction.kv_cache.expected_attention import ExpectedAttention
from mmaccel.reduction.kv_cache.h2o import H2O
from mmaccel.reduction.kv_cache.keydiff import KeyDiff
from mmaccel.reduction.kv_cache.knorm import KNorm
from mmaccel.reduction.kv_cache.kvzap import KVzap
from mmaccel.reduction.kv_cache.kvzip import KVzip
from mmaccel.reduction.kv_cache.linekv import LineKV
from mmaccel.reduction.kv_cache.morphkv import MorphKV
from mmaccel.reduction.kv_cache.pyramidkv import PyramidKV
from mmaccel.reduction.kv_cache.quantized_cache import QuantizedCache
from mmaccel.reduction.kv_cache.raas import RaaS
from mmaccel.reduction.kv_cache.random_eviction import RandomEviction
from mmaccel.reduction.kv_cache.scale_kv import ScaleKV
from mmaccel.reduction.kv_cache.snapkv import SnapKV
from mmaccel.reduction.kv_cache.streaming_llm import StreamingLLM
from mmaccel.reduction.kv_cache.tova import TOVA
from mmaccel.reduction.kv_cache.vatp import VATP
from mmaccel.reduction.sparse_attention.act_qkv import ActQKV
from mmaccel.reduction.sparse_attention.contract import AttentionMethod
from mmaccel.reduction.sparse_attention.contract import BlockScorer
from mmaccel.reduction.sparse_attention.contract import LayerBlocks
from mmaccel.reduction.sparse_attention.contract import PromptBlocks
from mmaccel.reduction.sparse_attention.contract import PromptMethod
from mmaccel.reduction.sparse_attention.dhsa import DHSA
from mmaccel.reduction.sparse_attention.hip import HiP
from mmaccel.reduction.sparse_attention.local_window import LocalWindow
from mmaccel.reduction.sparse_attention.long_heads import LongHeads
from mmaccel.reduction.sparse_attention.m_inference import MInference
from mmaccel.reduction.sparse_attention.quest import Quest
from mmaccel.reduction.sparse_attention.tidal_decode import TidalDecode
from mmaccel.reduction.sparse_attention.token_select import TokenSelect
from mmaccel.reduction.sparse_attention.top_p import TopP
from mmaccel.reduction.sparse_attention.video_chunks import VideoChunks
from mmaccel.reduction.sparse_attention.x_attention import XAttention
from mmaccel.reduction.visual_tokens.cdpruner import CDPruner
from mmaccel.reduction.visual_tokens.dart import DART
from mmaccel.reduction.visual_tokens.divprune import DivPrune
from mmaccel.reduction.visual_tokens.downsample import Downsample
from mmaccel.reduction.visual_tokens.downsample_pixels import DownsamplePixels
from mmaccel.reduction.visual_tokens.evs import EVS
from mmaccel.reduction.visual_tokens.fastv import FastV
from mmaccel.reduction.visual_tokens.ficoco import FiCoCoL
from mmaccel.reduction.visual_tokens.ficoco import FiCoCoV
from mmaccel.reduction.visual_tokens.hired import HiRED
from mmaccel.reduction.visual_tokens.ilre import ILRe
from mmaccel.reduction.visual_tokens.lazy_llm import LazyLLM
from mmaccel.reduction.visual_tokens.pixel_prune import PixelPrune
from mmaccel.reduction.visual_tokens.pyramid_drop import PyramidDrop
from mmaccel.reduction.visual_tokens.random_tokens import RandomTokens
from mmaccel.reduction.visual_tokens.tome import ToMe
from mmaccel.reduction.visual_tokens.uniform_tokens import UniformTokens
from mmaccel.reduction.visual_tokens.vidcom2 import VidCom2
from mmaccel.reduction.visual_tokens.visionzip import VisionZip
from mmaccel.results import Generation
from mmaccel.results import Progress
from mmaccel.results import Stats
from mmaccel.samplers.canvas.adaptive_block import AdaptiveBlock
from mmaccel.samplers.canvas.cache_plan import CachePlan
from mmaccel.samplers.canvas.confident_parallel import ConfidentParallel
from mmaccel.samplers.canvas.entropy_bounded import EntropyBounded
from mmaccel.samplers.canvas.explore_exploit import ExploreExploit
from mmaccel.samplers.canvas.fast_var import FastVAR
from mmaccel.samplers.canvas.kl_stable import KLStable
from mmaccel.samplers.canvas.layered_parallel import LayeredParallel
from mmaccel.samplers.canvas.learned_filter import LearnedFilter
from mmaccel.samplers.canvas.local_leap import LocalLeap
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.canvas.masked_parallel import MaskedParallel
from mmaccel.samplers.canvas.next_scale import NextScale
from mmaccel.samplers.canvas.revised_parallel import RevisedParallel
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.drafting.bandit_spec import BanditSpec
from mmaccel.samplers.drafting.coarse import Coarse
from mmaccel.samplers.drafting.draft_model import DraftModel
from mmaccel.samplers.drafting.heads.eagle import Eagle
from mmaccel.samplers.drafting.heads.mtp import MTP
from mmaccel.samplers.drafting.hierarchy import HierarchyDrafting
from mmaccel.samplers.drafting.lengths.disco import DISCO
from mmaccel.samplers.drafting.lengths.specdec_pp import SpecDecPP
from mmaccel.samplers.drafting.lengths.svip import SVIP
from mmaccel.samplers.drafting.memory.aded import ADED
from mmaccel.samplers.drafting.memory.lookahead import Lookahead
from mmaccel.samplers.drafting.memory.sibling_rows import SiblingRows
from mmaccel.samplers.drafting.memory.source_image import SourceImage
from mmaccel.samplers.drafting.memory.source_text import SourceText
from mmaccel.samplers.drafting.memory.stand import STAND
from mmaccel.samplers.drafting.parallel.dflash import DFlash
from mmaccel.samplers.drafting.parallel.own_canvas import OwnCanvas
from mmaccel.samplers.drafting.parallel.pard import Pard
from mmaccel.samplers.drafting.self_draft import SelfDraft
from mmaccel.samplers.drafting.shared_ids import frequent_ids
from mmaccel.samplers.drafting.token_recycling import TokenRecycling
from mmaccel.samplers.drafting.triforce import TriForce
from mmaccel.samplers.drafting.vegas import Vegas
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.prefix_tree import PrefixTree
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.trees.comb import Comb
from mmaccel.samplers.trees.dyspec import DySpec
from mmaccel.samplers.trees.forked_comb import ForkedComb
from mmaccel.samplers.trees.sequoia import Sequoia
from mmaccel.samplers.trees.siblings.mcsd import MCSD
from mmaccel.samplers.trees.siblings.rsd import RSD
from mmaccel.samplers.trees.siblings.spectr import SpecTr
from mmaccel.samplers.trees.spec_exec import SpecExec
from mmaccel.samplers.trees.tetris import TETRIS
from mmaccel.samplers.window.acoustic_groups import AcousticGroups
from mmaccel.samplers.window.autoregressive import Autoregressive
from mmaccel.samplers.window.diagonals import FlashAR
from mmaccel.samplers.window.grouped_speculative import GroupedSpeculative
from mmaccel.samplers.window.jacobi import Jacobi
from mmaccel.samplers.window.row_parallel import RowParallel
from mmaccel.samplers.window.speculative import Speculative
from mmaccel.samplers.window.speculative_jacobi import SpeculativeJacobi
from mmaccel.tokenizers_vq.frames import Frames
from mmaccel.tokenizers_vq.grid import Grid

__version__: str
__all__ = [
    "__version__",
    "ADED",
    "AcousticGroups",
    "ActQKV",
    "AdaptiveBlock",
    "Answer",
    "Answers",
    "AttachError",
    "AttentionMethod",
    "Autoregressive",
    "BanditSpec",
    "BiLevelKV",
    "BlockScorer",
    "BusyError",
    "CDPruner",
    "CItruS",
    "CacheMethod",
    "CachePlan",
    "CacheQuantizer",
    "CachedBlocks",
    "CachedLayer",
    "CausalLMWindow",
    "Chelsea",
    "ChunkKV",
    "Clip",
    "Clips",
    "Coarse",
    "Comb",
    "ConfidentParallel",
    "ContinuousBatching",
    "DART",
    "DFlash",
    "DHSA",
    "DISCO",
    "DivPrune",
    "Downsample",
    "DownsamplePixels",
    "DraftModel",
    "DuoAttention",
    "DySpec",
    "EVS",
    "Eagle",
    "EntropyBounded",
    "EntropyTemperature",
    "ExpectedAttention",
    "ExploreExploit",
    "FastV",
    "FastVAR",
    "FiCoCoL",
    "FiCoCoV",
    "FlashAR",
    "ForkedComb",
    "Frames",
    "FrustratinglySimple",
    "Generation",
    "Grid",
    "GroupedSpeculative",
    "H2O",
    "Handle",
    "HiP",
    "HiRED",
    "HierarchyDrafting",
    "ILRe",
    "ImageToText",
    "ImageToVideo",
    "Jacobi",
    "KLStable",
    "KNorm",
    "KVzap",
    "KVzip",
    "KeyDiff",
    "LayerBlocks",
    "LayeredParallel",
    "LazyLLM",
    "LearnedFilter",
    "LineKV",
    "LocalLeap",
    "LocalWindow",
    "LongHeads",
    "Lookahead",
    "LosslessUnmask",
    "MCSD",
    "MInference",
    "MMAccelError",
    "MTP",
    "MaskedParallel",
    "MissingBackendError",
    "MorphKV",
    "NextScale",
    "Noise",
    "NumericsError",
    "OptionError",
    "OwnCanvas",
    "Pard",
    "PixelPrune",
    "Policy",
    "PrefixTree",
    "Progress",
    "Prompt",
    "PromptBlocks",
    "PromptMethod",
    "PyramidDrop",
    "PyramidKV",
    "QuantizedCache",
    "Quest",
    "RSD",
    "RaaS",
    "RandomEviction",
    "RandomTokens",
    "RepetitionAwareSampling",
    "Request",
    "RequestOutput",
    "RevisedParallel",
    "RowParallel",
    "STAND",
    "SVIP",
    "SamplingParams",
    "ScaleKV",
    "SelfDraft",
    "Sequoia",
    "ShapeError",
    "SiblingRows",
    "SnapKV",
    "SourceImage",
    "SourceText",
    "SpecDecPP",
    "SpecExec",
    "SpecTr",
    "Speculative",
    "SpeculativeJacobi",
    "Speech",
    "SpeechChunk",
    "SpeechStream",
    "Stats",
    "Stepwise",
    "StreamingLLM",
    "TETRIS",
    "TOVA",
    "TextToImage",
    "TextToSpeech",
    "TextToVideo",
    "TidalDecode",
    "ToMe",
    "TokenModel",
    "TokenRecycling",
    "TokenSelect",
    "TopNSigma",
    "TopP",
    "TriForce",
    "UniformTokens",
    "UnsupportedModelError",
    "Utterance",
    "VATP",
    "Vegas",
    "VidCom2",
    "VideoChunks",
    "VisionZip",
    "VisualTokenizer",
    "WindowedRepetitionPenalty",
    "XAttention",
    "attach",
    "decoder",
    "detach",
    "frequent_ids",
    "load_demo",
    "share_ids",
    "stateless",
    "supports",
    "trim_vocabulary",
]
