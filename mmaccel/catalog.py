"""The catalog: short names of policies, of methods for visual tokens and of demo models.

Targets are strings until they are loaded, so that listing them imports nothing. Those of other
packages and of the user are found by `mmaccel.own_code`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from mmaccel.checks import field_types, members, show, suggest
from mmaccel.errors import OptionError
from mmaccel.options import parse_fields, read_text
from mmaccel.own_code import ONLY_TYPED, find_named, installed, is_module_name


@dataclass(frozen=True)
class Entry:
    """A method under a short name: `target` is "module:Class", `slot` one of `METHODS`; the fields
    in `preset` are fixed by the name, and no options under it.
    """

    target: str
    summary: str
    preset: Mapping[str, Any] = field(default_factory=dict)
    slot: str = "window"

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def class_name(self) -> str:
        return self.target.partition(":")[2]


@dataclass(frozen=True)
class DemoModel:
    """A model that ships with the package, in `mmaccel/demo/weights/<name>/`.

    `captions` is "module:function" of (collection, indices) to prompts, `fresh` "module:constant",
    a collection whose images were not trained on.
    """

    summary: str
    captions: str
    fresh: str
    examples: tuple[str, ...]


BASES = {  # slot -> base class of its methods; None: a class with the members of a policy
    "window": None,
    "canvas": None,
    "drafts": "mmaccel.samplers.drafting.contract:DraftSource",
    "tree": "mmaccel.samplers.trees.contract:TreeShape",
    "siblings": "mmaccel.samplers.trees.siblings.contract:SiblingRule",
    "visual_tokens": "mmaccel.reduction.visual_tokens.contract:TokenReducer",
    "kv_cache": "mmaccel.reduction.kv_cache.contract:KVCacheMethod",
    "attention": "mmaccel.reduction.sparse_attention.contract:AttentionMethod",
}
GROUPS = {"window": "policies", "canvas": "policies", "visual_tokens": "reducers"}
"""Slots whose group of entry points has another name than the slot."""
_FOLDERS = {
    "window": "samplers.window",
    "canvas": "samplers.canvas",
    "drafts": "samplers.drafting",
    "tree": "samplers.trees",
    "siblings": "samplers.trees.siblings",
    "visual_tokens": "reduction.visual_tokens",
    "kv_cache": "reduction.kv_cache",
    "attention": "reduction.sparse_attention",
}
_DRAFTING = "mmaccel.samplers.drafting.sources:"


def _entry(slot: str, target: str, summary: str, preset: Mapping[str, Any] | None = None) -> Entry:
    return Entry(f"mmaccel.{_FOLDERS[slot]}.{target}", summary, preset or {}, slot)


_ROWS: dict[str, dict[str, tuple[Any, ...]]] = {  # slot -> short name -> arguments of `_entry`
    "window": {
        "autoregressive": ("autoregressive:Autoregressive", "token by token; the reference"),
        "jacobi": ("jacobi:Jacobi", "fixed point with frozen noise"),
        "sjd": (
            "speculative_jacobi:SpeculativeJacobi",
            "speculative Jacobi decoding, fresh drafts",
            {"coupling": "independent"},
        ),
        "mc-sjd": (
            "speculative_jacobi:SpeculativeJacobi",
            "speculative Jacobi decoding, maximal coupling",
            {"coupling": "maximal"},
        ),
        "gumbel-sjd": (
            "speculative_jacobi:SpeculativeJacobi",
            "speculative Jacobi decoding, Gumbel coupling",
            {"coupling": "gumbel"},
        ),
        "speculative": (
            "speculative:Speculative",
            "a draft model (draft_model=), or the drafts of a source; prompt lookup at first",
        ),
        "prompt-lookup": (
            "speculative:Speculative",
            "drafts copied from before",
            {"draft_model": None, "drafts": "ngram"},
        ),
        "gsd": (
            "grouped_speculative:GroupedSpeculative",
            "grouped speculative decoding: other images, reports its divergence",
        ),
        "pcg": (
            "acoustic_groups:AcousticGroups",
            "speech codes accepted by groups: other sound, reports its divergence",
        ),
        "row-parallel": (
            "row_parallel:RowParallel",
            "rows of an image in parallel: other images, reports its divergence",
        ),
        "flashar": ("diagonals:FlashAR", "diagonals of an image, by trained heads: other images"),
    },
    "canvas": {
        "stepwise": ("stepwise:Stepwise", "one slot a pass; the reference"),
        "lossless-unmask": ("lossless_unmask:LosslessUnmask", "nested drafts, the same tokens"),
        "entropy-bounded": ("entropy_bounded:EntropyBounded", "a bound in nats"),
        "confident-parallel": (
            "confident_parallel:ConfidentParallel",
            "a threshold or a profile",
        ),
        "kl-stable": ("kl_stable:KLStable", "confident slots whose distribution is stable"),
        "local-leap": ("local_leap:LocalLeap", "a lower threshold around confident slots"),
        "adaptive-block": ("adaptive_block:AdaptiveBlock", "blocks end at delimiters"),
        "revised-parallel": ("revised_parallel:RevisedParallel", "bold drafts, checked"),
        "masked-parallel": ("masked_parallel:MaskedParallel", "MaskGIT and Halton"),
        "layered-parallel": ("layered_parallel:LayeredParallel", "OmniVoice: earlier books first"),
        "explore-exploit": (
            "explore_exploit:ExploreExploit",
            "confident slots, and an uncertain one where they are few",
        ),
        "learned-filter": ("learned_filter:LearnedFilter", "slots that a trained filter picks"),
        "next-scale": ("next_scale:NextScale", "a scale of an image a pass"),
        "fast-var": ("fast_var:FastVAR", "the same, and of the last scales what stands out"),
        "fast-var-random": (
            "fast_var:FastVAR",
            "the same, and of the last scales random entries; a control",
            {"choose": "random"},
        ),
    },
    "drafts": {
        "auto": (
            "coarse:Auto",
            "suffix for text; else the model's coarse model, previous-frame or neighbour",
        ),
        "coarse": ("coarse:ShippedCoarse", "corrections by the model's coarse model"),
        "online": ("online:Online", "corrections learned while it runs"),
        "token-recycling": ("token_recycling:TokenRecycling", "what followed a token before"),
        "random": ("random_tokens:Random", "drawn from all tokens; a control"),
        "left": ("copies:Left", "the token to the left"),
        "above": ("copies:Above", "the token above, in a grid"),
        "previous-frame": ("copies:PreviousFrame", "the same place a frame before"),
        "moved-frame": ("moved_frame:MovedFrame", "a frame before, moved as it moved"),
        "ngram": ("ngram:NGram", "copied from where the last tokens stood before"),
        "suffix": ("memory.suffix:Suffix", "what followed the longest match, while that pays"),
        "hierarchy": (
            "hierarchy:HierarchyDrafting",
            "copied from the row's text, else the batch's, else its prompt",
        ),
        "lookahead": ("memory.lookahead:Lookahead", "n-grams that guesses have run through"),
        "stand": ("memory.stand:STAND", "what was likely after the last tokens before"),
        "aded": ("memory.aded:ADED", "what mostly followed the last two tokens"),
        "sibling-rows": (
            "memory.sibling_rows:SiblingRows",
            "what samples of one prompt agree on",
        ),
        "bandit": ("bandit_spec:BanditSpec", "the source and the width that gain most"),
        "neighbour": ("neighbour:Neighbour", "the last scores, drawn from again"),
        "vegas": ("vegas:Vegas", "the model itself, over what the last pass attended to"),
        "mtp": ("heads.mtp:MTP", "the model's own layer for multi-token prediction"),
        "triforce": ("triforce:TriForce", "the model itself, over chunks that match a query"),
    },
    "tree": {
        "comb": ("comb:Comb", "branches of one length beside the chain"),
        "dyspec": ("dyspec:DySpec", "the likeliest nodes, by the drafter's chances"),
        "sequoia": ("sequoia:Sequoia", "a fixed tree, by measured chances"),
        "forked-comb": ("forked_comb:ForkedComb", "a comb whose branches fork once more"),
        "spec-exec": ("spec_exec:SpecExec", "very many nodes, a few calls of the drafter"),
        "tetris": ("tetris:TETRIS", "the likeliest nodes of all rows together"),
    },
    "siblings": {
        "rsd": ("rsd:RSD", "drafts without replacement, verified in turn"),
        "mcsd": ("mcsd:MCSD", "drafts with replacement, verified in turn"),
        "spectr": ("spectr:SpecTr", "drafts with replacement, by k-sequential selection"),
    },
    "visual_tokens": {  # in the order of docs/visual-tokens.md
        "downsample": ("downsample:Downsample", "a coarser grid; a control"),
        "downsample-pixels": (
            "downsample_pixels:DownsamplePixels",
            "a smaller image before the encoder; a control",
        ),
        "pixel-prune": (
            "pixel_prune:PixelPrune",
            "patches that repeat no neighbour, before the encoder",
        ),
        "random": ("random_tokens:RandomTokens", "drawn by the seed; a control"),
        "uniform": ("uniform_tokens:UniformTokens", "at equal distances; a control"),
        "divprune": ("divprune:DivPrune", "the most different ones"),
        "cdpruner": ("cdpruner:CDPruner", "the most different ones that match the text"),
        "visionzip": ("visionzip:VisionZip", "what the encoder attends to, the rest merged"),
        "hired": ("hired:HiRED", "what the class token attends to, a budget for each tile"),
        "vidcom2": ("vidcom2:VidCom2", "what is unlike the rest of a video"),
        "evs": ("evs:EVS", "what changes between frames"),
        "tome": ("tome:ToMe", "similar ones merged inside the encoder"),
        "ficoco-v": ("ficoco:FiCoCoV", "redundant ones merged inside the encoder"),
        "ficoco-l": ("ficoco:FiCoCoL", "redundant ones merged inside the language model"),
        "dart": ("dart:DART", "what is unlike a few pivots, at layer 2"),
        "fastv": ("fastv:FastV", "what the last token attends to, at layer 2"),
        "pyramid-drop": ("pyramid_drop:PyramidDrop", "the same at three layers, fewer each"),
        "lazy-llm": ("lazy_llm:LazyLLM", "the same, and dropped ones may come back"),
        "ilre": ("ilre:ILRe", "what the text attends to in one layer, then from the start"),
    },
    "kv_cache": {
        "snapkv": ("snapkv:SnapKV", "what the end of the prompt attends to"),
        "pyramidkv": ("pyramidkv:PyramidKV", "the same, and more of it in lower layers"),
        "chunkkv": ("chunkkv:ChunkKV", "the same, as whole chunks of neighbours"),
        "citrus": ("citrus:CItruS", "what the instruction at the end attends to"),
        "tova": ("tova:TOVA", "what the last entry attends to"),
        "h2o": ("h2o:H2O", "what the whole prompt attends to, and the last entries"),
        "vatp": ("vatp:VATP", "the same, weighted by the size of values"),
        "expected-attention": (
            "expected_attention:ExpectedAttention",
            "what queries to come are expected to attend to",
        ),
        "knorm": ("knorm:KNorm", "entries whose keys are short"),
        "keydiff": ("keydiff:KeyDiff", "entries whose keys are unlike the others"),
        "streaming-llm": ("streaming_llm:StreamingLLM", "the first entries and the last ones"),
        "morphkv": ("morphkv:MorphKV", "what recent entries attend to, again and again"),
        "linekv": ("linekv:LineKV", "of an image, what its last row attends to, row by row"),
        "raas": ("raas:RaaS", "the prompt, and what was attended to last"),
        "kvzap": ("kvzap:KVzap", "in each head, what is above a threshold"),
        "kvzip": ("kvzip:KVzip", "what the prompt needs to be said again"),
        "duo-attention": (
            "duo_attention:DuoAttention",
            "all of heads that look far, else ends",
        ),
        "chelsea": ("chelsea:Chelsea", "means of entries whose keys are alike"),
        "bilevelkv": ("bilevelkv:BiLevelKV", "chunks of the question, means of the others"),
        "scale-kv": (
            "scale_kv:ScaleKV",
            "what a grid of a scale's entries attends to, all in a few layers",
        ),
        "quantized-cache": (
            "quantized_cache:QuantizedCache",
            "all entries, older ones in 8 or 4 bits",
        ),
        "random-eviction": ("random_eviction:RandomEviction", "random entries, a control"),
    },
    "attention": {
        "quest": ("quest:Quest", "blocks whose keys can match a query"),
        "dhsa": ("dhsa:DHSA", "blocks whose keys match a query in the mean"),
        "top-p": ("top_p:TopP", "the fewest blocks with a share of the estimated attention"),
        "tidal-decode": ("tidal_decode:TidalDecode", "what two layers choose for the others"),
        "token-select": ("token_select:TokenSelect", "what all heads vote for, again if alike"),
        "hip": ("hip:HiP", "blocks that a descent through halved chunks finds"),
        "act-qkv": ("act_qkv:ActQKV", "blocks that match what stands out in a window"),
        "long-heads": ("long_heads:LongHeads", "blocks whose representative key matches"),
        "x-attention": ("x_attention:XAttention", "of a prompt, what antidiagonal sums find"),
        "m-inference": ("m_inference:MInference", "of a prompt, a pattern for each head"),
        "video-chunks": ("video_chunks:VideoChunks", "of a prompt, chunks that see themselves"),
        "local-window": ("local_window:LocalWindow", "the first entries, and those nearby"),
    },
}
METHODS: dict[str, dict[str, Entry]] = {  # slot -> short name -> entry
    slot: {name: _entry(slot, *row) for name, row in rows.items()} for slot, rows in _ROWS.items()
}
POLICIES = METHODS["window"] | METHODS["canvas"]
REDUCERS = METHODS["visual_tokens"]

KEEP = 0.22
"""What a method keeps that is named alone: 128 of 576 tokens, as the methods' papers compare."""

_WINDOW = "mmaccel.pipelines.hosts.causal_lm.model:CausalLMWindow"
_MTP = "mmaccel.pipelines.hosts.causal_lm.mtp:open_mtp"
_VISION_LANGUAGE = "mmaccel.pipelines.hosts.vision_language.family:VisionLanguage"
_DEPTH = "mmaccel.pipelines.hosts.depth.decoders"
FAMILIES: dict[str, str] = {  # transformers' model_type -> "module:Class"
    **dict.fromkeys(
        (
            "chameleon",
            "gemma3",
            "idefics3",
            "internvl",
            "llava",
            "llava_next",
            "llava_onevision",
            "qwen2_5_vl",
            "qwen2_vl",
            "qwen3_vl",
            "smolvlm",
        ),
        _VISION_LANGUAGE,
    ),
    "csm_depth_decoder_model": f"{_DEPTH}:CsmDepth",
    "dia": "mmaccel.pipelines.hosts.delay.dia:Dia",
    "moshi_depth": f"{_DEPTH}:MoshiDepth",
    "musicgen": "mmaccel.pipelines.hosts.delay.musicgen:Musicgen",
    "musicgen_melody": "mmaccel.pipelines.hosts.delay.musicgen:Melody",
    "qwen3_omni_moe_talker_code_predictor": f"{_DEPTH}:CodePredictor",
    "qwen3_tts_talker_code_predictor": f"{_DEPTH}:TTSCodePredictor",
    "glm_image": "mmaccel.pipelines.models.glm_image:GlmImage",
    "higgs_audio_v2": "mmaccel.pipelines.hosts.delay.higgs:Higgs",
    "imagegpt": "mmaccel.pipelines.models.imagegpt:ImageGPT",
    "janus": "mmaccel.pipelines.models.janus:Janus",
}
LATENT_SPEECH = ("vibevoice", "pocket_tts", "gradium_phonon_tts")
"""`model_type`s of transformers whose frames of sound are continuous latents."""
IMAGE_CODES = ("chameleon", "chameleon_xllmx", "emu3", "glm_image", "imagegpt", "janus")
"""`model_type`s of transformers whose tokens may be codes of images, which no text drafts."""
_DIFFUSION = "mmaccel.pipelines.hosts.diffusion_lm."
PIPELINES = {  # class name -> "module:class" of its service
    "LLaDA2Pipeline": f"{_DIFFUSION}llada2.service:LLaDA2Service",
    "AmusedPipeline": f"{_DIFFUSION}amused:AmusedService",
    "DiffusionGemmaForBlockDiffusion": f"{_DIFFUSION}diffusion_gemma.generate:GemmaService",
    "DiffusionGemmaPipeline": f"{_DIFFUSION}diffusion_gemma.pipeline:GemmaPipelineService",
}

DENOISER_SERVICE = f"{_DIFFUSION}service:DenoiserService"
"""Serves a denoiser, and what one can be made of."""

IMAGE_MODELS = {  # family -> "module:function" of (path, load_config) to an `ImageModel`
    "words": "mmaccel.pipelines.models.scenes:load_words",
    "masked-words": "mmaccel.pipelines.models.scenes:load_masked_words",
    "scale-words": "mmaccel.pipelines.models.scenes_var:load_scale_words",
    "janus": "mmaccel.pipelines.models.janus:load_janus",
    "emu3": "mmaccel.pipelines.models.emu3:load_emu3",
    "chameleon": "mmaccel.pipelines.models.chameleon:load_chameleon",
    "lumina-mgpt": "mmaccel.pipelines.models.chameleon:load_lumina",
    "glm-image": "mmaccel.pipelines.models.glm_image:load_glm_image",
    "imagegpt": "mmaccel.pipelines.models.imagegpt:load_imagegpt",
    "llamagen": "mmaccel.pipelines.models.llamagen.text_to_image:load_llamagen",
    "var": "mmaccel.pipelines.models.var:load_var",
    "hart": "mmaccel.pipelines.models.hart:load_hart",
    "infinity": "mmaccel.pipelines.models.infinity:load_infinity",
}

SPEECH_MODELS = {  # family -> "module:function" of (path, tokenizer, codec's path, load_config)
    "llasa": "mmaccel.pipelines.models.llasa:load_llasa",
    "omnivoice": "mmaccel.pipelines.models.omnivoice:load_omnivoice",
    "orpheus": "mmaccel.pipelines.models.orpheus:load_orpheus",
    "voices": "mmaccel.pipelines.models.voices:load_voices",
    "voices-masked": "mmaccel.pipelines.models.voices_masked:load_voices_masked",
}
_ANY_FAMILY = "mmaccel.pipelines.hosts.causal_lm.family:CausalLM"

MODELS: dict[str, DemoModel] = {
    "scenes": DemoModel(
        "64x64 captioned scenes, 256 tokens an image",
        "mmaccel.demo.scenes.data:make_captions",
        "mmaccel.demo.scenes.data:EVALUATION_SEED",
        (
            "a red circle above a small blue square on grass",
            "a large yellow star left of a small purple ring at night",
            "a white triangle right of a green circle on water",
            "an orange ring below a large red square on sand",
            "a small blue star inside a large orange circle on snow",
            "a large purple square left of a white ring on grass",
            "a green triangle above a small yellow circle on water",
            "a small white circle below a large green star at night",
        ),
    ),
}
MODELS["scenes-masked"] = replace(
    MODELS["scenes"], summary="the same images and words, filled in any order"
)
MODELS["scenes-var"] = replace(
    MODELS["scenes"], summary="the same images and words, scale by scale: 204 tokens in 8 passes"
)
DEMO_WEIGHTS = Path(__file__).parent / "demo" / "weights"
"""A folder for each demo model, by its name."""

CLIP_MODELS: dict[str, DemoModel] = {  # likewise, of clips
    "moving-scenes": DemoModel(
        "clips of moving shapes from captions, 640 tokens each; for mmaccel animate",
        "mmaccel.demo.moving_scenes.data:make_captions",
        "mmaccel.demo.moving_scenes.data:EVALUATION_SEED",
        (
            "a red circle moves left over grass",
            "a blue square moves quickly up and vanishes over sand",
            "a yellow triangle appears and moves right on snow",
            "a green circle moves down and hits a white ring over water",
        ),
    )
}

VISION_DEMO = "mmaccel.demo.loading:load_demo"
"""Loads a model of `VISION_MODELS`, or a language model: "module:function" of its name."""

SPOKEN_MODELS = {
    "voices": "speaks English of 497 words in four voices; for mmaccel speak",
    "voices-masked": "the same words and voices, filled in any order; for mmaccel speak",
}
VISION_MODELS = {"scenes-vqa": "answers questions about busy scenes; for mmaccel answer"}
TEXT_MODELS = {
    "recall": "answers questions about long documents; for mmaccel evaluate cache",
}


def policy_names(kind: str = "window") -> list[str]:
    return list(METHODS[kind])


def default_policy(model: Any = None) -> str:
    """The short name of the exact policy of a model where none is named; None: of one that is
    decoded in windows.
    """
    if getattr(model, "kind", "window") == "window":
        return "jacobi"
    return "lossless-unmask" if model.lack("scales") else "next-scale"


def find_policy(name: str, kind: str | None = None) -> Entry:
    """The entry of a short name, an entry point, or a typed `module:Name`; else OptionError."""
    entry = POLICIES.get(name) or _own_policy(name)
    if entry is None or kind not in (None, entry.slot):
        names = list(POLICIES) if kind is None else policy_names(kind)
        because = "" if entry is None else f", which decodes a {entry.slot}, not a {kind}"
        raise OptionError(
            f"policy: expected one of {', '.join(names)}, received {show(name)}{because}; "
            f"{_remedy(name, names)}"
        )
    return entry


def _own_policy(name: str) -> Entry | None:
    target = find_own("window", name)
    if target is None:
        return None
    policy = load(target)
    summary = (policy.__doc__ or "").strip().partition("\n")[0]
    return Entry(target, summary, slot=getattr(policy, "kind", "window"))


def find_own(slot: str, name: str) -> str | None:
    return find_named(GROUPS.get(slot, slot), name, BASES[slot])


def _remedy(name: Any, names: Iterable[str]) -> str:
    return ONLY_TYPED if is_module_name(name) else suggest(name, names, "choose one of these")


def load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def make(slot: str, name: str, /, **options: Any) -> Any:
    """Build a method of a slot from its short name, of an entry point, or a typed `module:Name`,
    and the fields that the name does not fix. A relaxed one by name is the opt-in to it.
    """
    known = METHODS[slot]
    entry = known.get(name)
    target = find_own(slot, name) if entry is None else entry.target
    if target is None:
        other = next((each for each, entries in METHODS.items() if name in entries), None)
        remedy = _remedy(name, known) if other is None else f"{name} goes into {other}="
        raise OptionError(
            f"{slot}: expected one of {', '.join(known)}, received {show(name)}; {remedy}"
        )
    return _build(f"{slot} {name}", entry or Entry(target, ""), options, "method")


def make_policy(name: str, /, **options: Any) -> Any:
    return _build(f"policy {name}", find_policy(name), options, "policy")


def _build(where: str, entry: Entry, options: Mapping[str, Any], what: str) -> Any:
    """A method of an entry, where texts are read by the fields' types and methods may be named."""
    method = load(entry.target)
    _check_fields(where, method, entry.preset, options, what)
    kinds = field_types(method)
    values = {name: _read_field(name, given, kinds.get(name)) for name, given in options.items()}
    return method(**entry.preset, **values)


def _read_field(name: str, given: Any, kind: Any) -> Any:
    if not isinstance(given, str | Path | Mapping):
        return given
    bases = {f"{base.__module__}:{base.__qualname__}" for base in _parents(kind)}
    slot = next((slot for slot, base in BASES.items() if base in bases), None)
    if slot == "drafts" and not isinstance(given, Mapping):
        return _read_drafts(given)
    if slot is not None:
        return read_method(slot, given)
    return read_text(name, str(given), kind) if isinstance(given, str) else given


def _parents(kind: Any) -> Iterator[type]:
    for each in members(kind):
        yield from getattr(each, "__mro__", ())


def _check_fields(
    name: str, cls: Any, preset: Mapping[str, Any], options: Mapping[str, Any], what: str
) -> None:
    own = [f.name for f in fields(cls) if f.init and f.name not in preset]
    for option in options:
        if option not in own:
            raise OptionError(
                f"{name}: expected options out of {', '.join(own) or '(none)'}, received "
                f"{option!r}; {suggest(option, own, f'leave it out or choose another {what}')}"
            )
    for f in fields(cls):
        has_default = f.default is not MISSING or f.default_factory is not MISSING
        if f.init and not has_default and f.name not in {*preset, *options}:
            raise OptionError(
                f"{name}: expected a value for {f.name}, which has no default, received none; "
                f"give {f.name}=…"
            )


def _read_drafts(text: str | Path) -> Any:
    if str(text).partition(":")[0] in METHODS["drafts"] and ":" in str(text):
        return read_method("drafts", text)
    source = load(f"{_DRAFTING}parse_source")(text)
    if not isinstance(source, str) or source in load(f"{_DRAFTING}NAMES"):
        return source
    if find_own("drafts", source) is not None:
        return read_method("drafts", source)
    if is_module_name(text):
        raise OptionError(
            f"drafts: expected a draft source or a folder, received {show(text)}; {ONLY_TYPED}"
        )
    return source  # which the policy refuses, with the names it knows


def read_policy(policy: Any) -> Any:
    """The policy that a user names: one itself, "jacobi:window=32", or `{"name": "jacobi"}`."""
    if not isinstance(policy, str | Mapping):
        return policy
    name, options = read_named("policy", policy, POLICIES, '{"name": "jacobi", "window": 32}')
    return make_policy(name, **options)


def read_named(
    slot: str, given: str | Mapping[Any, Any], known: Container[str], example: str = ""
) -> tuple[str, dict[str, Any]]:
    """A method's name, or a `module:Name`, and fields: of `name:field=value:…` or a dictionary."""
    if isinstance(given, str):
        name, *fields_as_text = (part.strip() for part in given.split(":"))
        if fields_as_text and "=" not in fields_as_text[0] and name not in known:
            name = f"{name}:{fields_as_text.pop(0)}"
        kind = type(given)
        return kind(name), parse_fields(slot, map(kind, fields_as_text), f"{name}:name=value")
    options = {str(option): value for option, value in given.items()}
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise OptionError(
            f"{slot}: expected a dictionary with a name, received {show(dict(given))}; write for "
            f"example {example}"
        )
    return name, options


def read_method(slot: str, given: Any) -> Any:
    """The method of a slot that a user names, as `read_policy` reads policies; what is no name
    stays as it is. One for visual tokens that is named alone keeps `KEEP`.
    """
    if not isinstance(given, str | Mapping):
        return given
    known = METHODS[slot]
    example = "dart" if slot == "visual_tokens" else next(iter(known))
    name, options = read_named(slot, given, known, f'{{"name": "{example}"}}')
    if slot == "visual_tokens" and not {"keep", "n_keep"} & options.keys():
        options["keep"] = KEEP
    return make(slot, name, **options)


def open_draft_model(model: Any) -> Any:
    """A transformers causal LM as a `TokenModel` that drafts, or an UnsupportedModelError."""
    return load(_WINDOW)(model)


def open_mtp(model: Any, vocab_size: int) -> Any:
    """A transformers model's layer for multi-token prediction as a head, of `vocab_size` ids."""
    return load(_MTP)(model, vocab_size)


def find_family(model_type: str | None) -> str:
    """ "module:Class" of the family a transformers model belongs to.

    Another package adds a family as an entry point of the group `mmaccel.families`, named like the
    `model_type` of its configuration; it takes precedence over ours.
    """
    ours = FAMILIES.get(model_type or "", _ANY_FAMILY)
    return ours if model_type is None else installed("families").get(model_type, ours)
