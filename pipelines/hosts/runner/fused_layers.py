"""The decoder layers that the fused decoder knows: what each class of transformers computes.

A row of `LAYERS` names a layer's parts and their order; what a class leaves open is read from the
modules (`fused_structure`). A row is a claim, which `pipelines.hosts.causal_lm.self_check` tests.

Source: the decoders of transformers 5.17 to 5.24.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mmaccel.kernels.gated_act import Activation
from mmaccel.kernels.norm import NormKind


@dataclass(frozen=True)
class NormSpec:
    """A class of norm, see `mmaccel.kernels.norm.Norm`."""

    kind: NormKind = "rms"
    offset: float = 0.0
    eps: str = "variance_epsilon"  # the module's attribute
    has_bias: bool = False


@dataclass(frozen=True)
class Residuals:
    """Names of the norms of what goes into attention and MLP and of what comes out, or empty."""

    pre_attention: str = "input_layernorm"
    post_attention: str = ""
    pre_mlp: str = "post_attention_layernorm"
    post_mlp: str = ""
    is_parallel: bool = False  # attention and MLP read one sum, and are added to it at once
    parallel_if: str = ""  # the option that decides it
    stream_unless: str = ""  # the option without which sums themselves are normalised
    scale: str = ""  # the option that multiplies both updates


@dataclass(frozen=True)
class AttentionSpec:
    """Names of an attention's linear layers, and what becomes of queries, keys and scores."""

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # one name: packed in the checkpoint
    out: str = "o_proj"
    name: str = "self_attn"
    is_grouped: bool = False  # see `mmaccel.kernels.rope_write`
    norm: NormSpec | None = None  # of `q_norm` and `k_norm`
    norm_if: str = ""  # the option that decides whether there are any
    turns_if: str = ""  # the module's attribute that decides whether queries and keys turn
    turns_where_sliding: bool = False  # in sliding layers alone, if the model has some
    softcap: str = ""  # the option
    unless: str = ""  # an option with which attention is another
    unless_eager: str = ""  # and one with which eager attention is


@dataclass(frozen=True)
class MLPSpec:
    """Names of an MLP's linear layers and activation."""

    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    activation: str = "act_fn"
    is_gated: bool = True
    name: str = "mlp"  # empty: the parts are the layer's


@dataclass(frozen=True)
class LayerSpec:
    """A class of decoder layer, with the decoder around it."""

    residuals: Residuals = Residuals()
    attention: AttentionSpec = AttentionSpec()
    mlp: MLPSpec = MLPSpec()
    norm: NormSpec = NormSpec()  # all but those of queries and keys
    last_norm: str = "norm"
    positions: str = ""  # the table of learned positions; empty: rotary ones
    first_position: int = 0  # row of the table
    has_projections: bool = False  # before the first layer and after the last norm
    embed_scale: str = ""  # the option that multiplies embeddings
    interleaved: bool = False  # neighbours turn with each other
    repeats: bool = False  # by the first half of the angles, each for two
    has_kinds: bool = False  # sliding layers have other angles
    has_axes: bool = False  # positions have three axes
    since: str = ""  # the release of transformers that brought the class


@dataclass(frozen=True)
class HeadSpec:
    """What a head does to the logits of its linear layer; the fields are names of options."""

    scale: str = ""
    divisor: str = ""
    softcap: str = ""
    other: str = ""  # in words, what no option says


_LAYER = NormSpec("layer", eps="eps", has_bias=True)  # torch.nn.LayerNorm
_COHERE_NORM = NormSpec("layer")
_GEMMA_NORM = NormSpec(offset=1.0, eps="eps")

_AROUND = Residuals(
    post_attention="post_attention_layernorm",
    pre_mlp="pre_feedforward_layernorm",
    post_mlp="post_feedforward_layernorm",
)
_AROUND_GLM = Residuals(post_attention="post_self_attn_layernorm", post_mlp="post_mlp_layernorm")
_AFTER = Residuals("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_AFTER_SWIN = Residuals("", "input_layernorm", "", "post_attention_layernorm")
_APERTUS_NORMS = Residuals("attention_layernorm", pre_mlp="feedforward_layernorm")
_VAULT_NORMS = Residuals(pre_mlp="pre_feedforward_layernorm")
_OPT_NORMS = Residuals("self_attn_layer_norm", pre_mlp="final_layer_norm")
_PARALLEL = Residuals(pre_mlp="", is_parallel=True)
_EITHER = Residuals(parallel_if="use_parallel_residual")

_NORMED = AttentionSpec(norm=NormSpec())
_CAPPED = AttentionSpec(softcap="attn_logit_softcapping")
_C_ATTN = AttentionSpec(("c_attn",), "c_proj", "attn", unless_eager="reorder_and_upcast_attn")
_GROUPED = AttentionSpec(("query_key_value",), "dense", "attention", is_grouped=True)

_PACKED = MLPSpec(("gate_up_proj",), activation="activation_fn")
_PLAIN = MLPSpec(("up_proj",), is_gated=False)
_FC = MLPSpec(("fc1",), "fc2", "activation_fn", is_gated=False)
_C_FC = MLPSpec(("c_fc",), "c_proj", "act", is_gated=False)
_4H = MLPSpec(("dense_h_to_4h",), "dense_4h_to_h", "act", is_gated=False)

_LLAMA = LayerSpec()
_QWEN2_VL = LayerSpec(has_axes=True)
_QWEN3 = LayerSpec(attention=_NORMED)
_APERTUS = LayerSpec(_APERTUS_NORMS, _NORMED, _PLAIN)
_OLMO2 = LayerSpec(_AFTER, _NORMED)
_HELIUM = LayerSpec(interleaved=True, repeats=True)
_GLM = LayerSpec(mlp=_PACKED, interleaved=True, repeats=True)
_GLM4V = LayerSpec(_AROUND_GLM, mlp=_PACKED, interleaved=True, has_axes=True)
_COHERE = LayerSpec(_PARALLEL, norm=_COHERE_NORM, interleaved=True)
_CHAMELEON = LayerSpec(attention=AttentionSpec(norm=_LAYER))
_GEMMA2 = LayerSpec(_AROUND, _CAPPED, norm=_GEMMA_NORM)
_GPT2 = LayerSpec(
    Residuals("ln_1", pre_mlp="ln_2"), _C_ATTN, _C_FC, _LAYER, last_norm="ln_f", positions="wpe"
)
_BIOGPT = LayerSpec(
    _OPT_NORMS,
    AttentionSpec(out="out_proj"),
    replace(_FC, name=""),
    _LAYER,
    last_norm="layer_norm",
    positions="embed_positions",
    first_position=2,
)

LAYERS: dict[str, LayerSpec] = {  # "FAMILY.CLASS" of transformers.models
    "apertus.ApertusDecoderLayer": _APERTUS,
    "apertus1p5.Apertus1p5TextDecoderLayer": replace(_APERTUS, since="5.24"),
    "arcee.ArceeDecoderLayer": LayerSpec(mlp=_PLAIN),
    "biogpt.BioGptDecoderLayer": _BIOGPT,
    "chameleon.ChameleonDecoderLayer": _CHAMELEON,
    "chameleon.ChameleonSwinDecoderLayer": replace(_CHAMELEON, residuals=_AFTER_SWIN),
    "cohere.CohereDecoderLayer": replace(
        _COHERE, attention=AttentionSpec(norm=_COHERE_NORM, norm_if="use_qk_norm")
    ),
    "cohere2.Cohere2DecoderLayer": replace(
        _COHERE, attention=AttentionSpec(turns_where_sliding=True)
    ),
    "csm.CsmDecoderLayer": _LLAMA,
    "cwm.CwmDecoderLayer": _LLAMA,
    "emu3.Emu3DecoderLayer": _LLAMA,
    "ernie4_5.Ernie4_5DecoderLayer": _HELIUM,
    "exaone4.Exaone4DecoderLayer": LayerSpec(_AFTER, replace(_NORMED, turns_where_sliding=True)),
    "gemma.GemmaDecoderLayer": LayerSpec(norm=_GEMMA_NORM),
    "gemma2.Gemma2DecoderLayer": _GEMMA2,
    "gemma3.Gemma3DecoderLayer": replace(
        _GEMMA2, attention=AttentionSpec(norm=_GEMMA_NORM), has_kinds=True
    ),
    "glm.GlmDecoderLayer": _GLM,
    "glm4.Glm4DecoderLayer": replace(_GLM, residuals=_AROUND_GLM),
    "glm4v.Glm4vTextDecoderLayer": _GLM4V,
    "glm_image.GlmImageTextDecoderLayer": LayerSpec(_AROUND_GLM, mlp=_PACKED, has_axes=True),
    "glm_ocr.GlmOcrTextDecoderLayer": _GLM4V,
    "gpt2.GPT2Block": _GPT2,
    "gpt_bigcode.GPTBigCodeBlock": replace(
        _GPT2, attention=AttentionSpec(("c_attn",), "c_proj", "attn", is_grouped=True)
    ),
    "gpt_neox.GPTNeoXLayer": LayerSpec(
        _EITHER, _GROUPED, _4H, _LAYER, last_norm="final_layer_norm"
    ),
    "granite.GraniteDecoderLayer": LayerSpec(
        Residuals(scale="residual_multiplier"), embed_scale="embedding_multiplier"
    ),
    "helium.HeliumDecoderLayer": _HELIUM,
    "jais2.Jais2DecoderLayer": LayerSpec(mlp=_PLAIN, norm=_LAYER),
    "llama.LlamaDecoderLayer": _LLAMA,
    "ministral.MinistralDecoderLayer": _LLAMA,
    "mistral.MistralDecoderLayer": _LLAMA,
    "olmo2.Olmo2DecoderLayer": _OLMO2,
    "olmo3.Olmo3DecoderLayer": replace(_OLMO2, has_kinds=True),
    "opt.OPTDecoderLayer": replace(
        _BIOGPT,
        residuals=replace(_OPT_NORMS, stream_unless="do_layer_norm_before"),
        last_norm="final_layer_norm",
        has_projections=True,
    ),
    "paddleocr_vl.PaddleOCRDecoderLayer": _QWEN2_VL,
    "phi.PhiDecoderLayer": LayerSpec(
        _PARALLEL,
        AttentionSpec(out="dense", unless="qk_layernorm"),
        _FC,
        _LAYER,
        last_norm="final_layernorm",
    ),
    "phi3.Phi3DecoderLayer": LayerSpec(attention=AttentionSpec(("qkv_proj",)), mlp=_PACKED),
    "qwen2.Qwen2DecoderLayer": _LLAMA,
    "qwen2_vl.Qwen2VLDecoderLayer": _QWEN2_VL,
    "qwen2_5_vl.Qwen2_5_VLDecoderLayer": _QWEN2_VL,
    "qwen3.Qwen3DecoderLayer": _QWEN3,
    "qwen3_omni_moe.Qwen3OmniMoeTalkerCodePredictorDecoderLayer": _QWEN3,
    "qwen3_vl.Qwen3VLTextDecoderLayer": replace(_QWEN3, has_axes=True),
    "seed_oss.SeedOssDecoderLayer": _LLAMA,
    "smollm3.SmolLM3DecoderLayer": LayerSpec(attention=AttentionSpec(turns_if="use_rope")),
    "stablelm.StableLmDecoderLayer": LayerSpec(
        _EITHER, AttentionSpec(unless="qk_layernorm"), norm=_LAYER
    ),
    "starcoder2.Starcoder2DecoderLayer": LayerSpec(mlp=_C_FC, norm=_LAYER),
    "vaultgemma.VaultGemmaDecoderLayer": replace(_GEMMA2, residuals=_VAULT_NORMS),
}

_CAPPED_HEAD = HeadSpec(softcap="final_logit_softcapping")
HEADS: dict[str, HeadSpec] = {  # a head that is not here is its linear layer
    "chameleon.ChameleonForConditionalGeneration": HeadSpec(other="masks the ids of images"),
    "cohere.CohereForCausalLM": HeadSpec(scale="logit_scale"),
    "cohere2.Cohere2ForCausalLM": HeadSpec(scale="logit_scale"),
    "gemma2.Gemma2ForCausalLM": _CAPPED_HEAD,
    "gemma3.Gemma3ForCausalLM": _CAPPED_HEAD,
    "granite.GraniteForCausalLM": HeadSpec(divisor="logits_scaling"),
    "vaultgemma.VaultGemmaForCausalLM": _CAPPED_HEAD,
}

ACTIVATIONS: dict[str, Activation] = {  # classes of torch.nn and transformers.activations
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
}
