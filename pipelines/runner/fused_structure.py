"""What a decoder is made of, as the fused decoder runs it: found by structure, not by family.

transformers writes the same layer out once a model. So what a layer does is read from what its
`forward` names, and from the modules it holds: a name that is not known here (a clamp, a router, an
attention scale that depends on the length) means that the model keeps its own forward. A structure
found here is a claim; `mmaccel.pipelines.causal_lm.self_check` compares its logits with the model's
own before it is used.

Source: the decoders of transformers 5.17 to 5.24.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmaccel.kernels.gated_act import Activation
from mmaccel.kernels.norm import HeadNorms, Norm, NormKind
from mmaccel.kernels.rope_write import sign_sine
from mmaccel.pipelines.runner.packed_linear import is_input_major

_NORMS: dict[str, tuple[NormKind, float]] = {  # what a norm's forward names: kind, weight's offset
    "dtype to torch float32 pow mean rsqrt variance_epsilon weight": ("rms", 0.0),
    "_norm float weight type_as": ("rms", 1.0),
    "dtype to torch float32 mean pow rsqrt variance_epsilon weight": ("layer", 0.0),
    "F layer_norm normalized_shape weight bias": ("layer", 0.0),
}
_ATTENTION = frozenset(
    "shape size head_dim q_proj k_proj v_proj qkv_proj o_proj dense view transpose reshape "
    "contiguous apply_rotary_pos_emb update layer_idx ALL_ATTENTION_FUNCTIONS get_interface config "
    "_attn_implementation eager_attention_forward training attention_dropout scaling getattr "
    "sliding_window is_sliding use_rope q_norm k_norm use_qk_norm num_attention_heads num_heads "
    "num_key_value_heads attn_logit_softcapping nn functional dropout residual_dropout "
    "qk_layernorm q_layernorm k_layernorm rotary_ndims torch cat query_key_value head_size chunk "
    "c_attn c_proj split split_size out_proj attn_dropout resid_dropout p "
    "reorder_and_upcast_attn _upcast_and_reordered_attn multi_query embed_dim kv_dim unsqueeze "
    # attention to an encoder, which no pass here has
    "isinstance EncoderDecoderCache is_updated get cross_attention_cache self_attention_cache "
    "hasattr ValueError q_attn layers keys values is_cross_attention".split()
)
_MLP = frozenset(
    "down_proj gate_proj up_proj gate_up_proj chunk act_fn activation_fn act fc1 fc2 c_fc c_proj "
    "dense_h_to_4h dense_4h_to_h nn functional dropout residual_dropout training".split()
)
_DROPOUT = frozenset(
    "dropout resid_dropout resid_attn_dropout resid_mlp_dropout post_attention_dropout "
    "post_mlp_dropout activation_dropout residual_multiplier".split()
)


@dataclass(frozen=True)
class _Residuals:
    """Names of the norms before and after attention and MLP, and how the two follow."""

    pre_attention: str = ""
    post_attention: str = ""
    pre_mlp: str = ""
    post_mlp: str = ""
    is_parallel: bool = False


_IN, _POST = "input_layernorm", "post_attention_layernorm"
_LAYERS = {  # what a layer's forward names, in order, without dropout
    f"{_IN} self_attn {_POST} mlp": _Residuals(_IN, pre_mlp=_POST),
    "attention_layernorm self_attn feedforward_layernorm mlp": _Residuals(
        "attention_layernorm", pre_mlp="feedforward_layernorm"
    ),
    f"{_IN} self_attn pre_feedforward_layernorm mlp": _Residuals(
        _IN, pre_mlp="pre_feedforward_layernorm"
    ),
    f"{_IN} self_attn mlp": _Residuals(_IN, is_parallel=True),
    f"{_IN} self_attn {_POST} pre_feedforward_layernorm mlp post_feedforward_layernorm": _Residuals(
        _IN, _POST, "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
    f"{_IN} self_attn post_self_attn_layernorm {_POST} mlp post_mlp_layernorm": _Residuals(
        _IN, "post_self_attn_layernorm", _POST, "post_mlp_layernorm"
    ),
    f"{_IN} self_attn use_parallel_residual mlp {_POST}": _Residuals(_IN, pre_mlp=_POST),
    f"self_attn {_POST} mlp post_feedforward_layernorm": _Residuals(
        post_attention=_POST, post_mlp="post_feedforward_layernorm"
    ),
    f"self_attn {_IN} mlp {_POST}": _Residuals(post_attention=_IN, post_mlp=_POST),
    f"attention {_IN} use_parallel_residual mlp {_POST}": _Residuals(_IN, pre_mlp=_POST),
    "ln_1 attn hasattr ValueError ln_cross_attn crossattention ln_2 mlp": _Residuals(
        "ln_1", pre_mlp="ln_2"
    ),
    "do_layer_norm_before self_attn_layer_norm self_attn nn functional training shape reshape size "
    "final_layer_norm fc1 activation_fn fc2 view": _Residuals(
        "self_attn_layer_norm", pre_mlp="final_layer_norm"
    ),
    "self_attn_layer_norm self_attn nn functional training final_layer_norm fc1 activation_fn "
    "fc2": _Residuals("self_attn_layer_norm", pre_mlp="final_layer_norm"),
}
_DECODER = frozenset(
    "ValueError embed_tokens DynamicCache config get_seq_length torch arange shape device "
    "unsqueeze expand ndim view isinstance dict copy set enumerate create_causal_mask "
    "create_sliding_window_causal_mask sliding_window has_sliding_layers layer_types "
    "num_hidden_layers layers norm final_layernorm rotary_emb BaseModelOutputWithPast "
    "CwmModelOutputWithPast jit is_tracing embedding_multiplier nn functional dropout "
    "embedding_dropout embed_dropout training use_bidirectional_attention "
    "_bidirectional_window_overlay "
    "embed_in emb_dropout final_layer_norm wte wpe drop h ln_f gradient_checkpointing to size pop "
    "warn_if_padding_and_no_attention_mask ones cumsum long embed_positions project_in project_out "
    "layerdrop rand layer_norm multi_query BaseModelOutputWithPastAndCrossAttentions "
    # an encoder, which no pass here has
    "add_cross_attention EncoderDecoderCache create_bidirectional_mask bool dim "
    "is_flash_attention_requested "
    # images in the prompt, which another pass has processed
    "get get_image_features pooler_output get_placeholder_mask masked_scatter".split()
)
_HEAD = frozenset(
    "model last_hidden_state slice_logits_to_keep isinstance int slice lm_head loss_function "
    "config text_config vocab_size past_key_values cache hidden_states attentions "
    "image_hidden_states image_outputs rope_deltas logit_scale logits_scaling "
    "final_logit_softcapping torch tanh decoder contiguous cross_attentions "
    "output_projection".split()
)
_HEAD_OUTPUTS = ("OutputWithPast", "OutputWithCrossAttentions")  # how a head's output class ends
_STACKS, _ATTENTIONS = ("layers", "h"), ("self_attn", "attn", "attention")
_LAST_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "layer_norm")
_UNPACKED = ("q_proj", "k_proj", "v_proj")
_TABLES = ("wpe", "embed_positions")  # of learned positions
_OTHERS = ("embed_tokens", "embed_in", "wte", "drop", "emb_dropout", "embed_dropout",
           "rotary_emb", "project_in", "project_out")  # fmt: skip
_OFFSET = ("torch", "cumsum", "long", "super", "forward", "offset")  # a table that begins later
_ACTIVATIONS: dict[str, Activation] = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELU": "gelu", "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh", "FastGELUActivation": "gelu_tanh",
}  # fmt: skip
_LONG = ("NewGELUActivation", "FastGELUActivation")  # `gelu_tanh` in eight operations
_THEIRS = "transformers.utils.output_capturing"  # its hooks do nothing unless states are wanted


class UnrecognisedError(Exception):
    """What was found instead of a structure that the fused decoder knows."""


@dataclass(frozen=True)
class Attention:
    """Attention of a layer.

    Attributes:
        projections: linear layers whose outputs are queries, keys and values, in this order.
        grouped: see `mmaccel.kernels.rope_write`.
        out: the linear layer after the heads.
        norms: of queries and keys before they turn, or None.
        heads, kv_heads, head_dim: Hq, Hkv, D.
        scale: of the scores.
        softcap: c, scores become `c tanh(score / c)`; None: as they are.
        turns: whether queries and keys have rotary positions.
    """

    projections: tuple[Any, ...]
    grouped: bool
    out: Any
    norms: HeadNorms | None
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    turns: bool


@dataclass(frozen=True)
class MLP:
    """The MLP of a layer.

    Attributes:
        projections: linear layers whose outputs are gate and up, or up alone.
        out: the linear layer down.
        gate: the activation of the gate; None where there is none.
        activation: what is between up and down where there is no gate.
    """

    projections: tuple[Any, ...]
    out: Any
    gate: Activation | None
    activation: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """A decoder layer.

    Attributes:
        attention, mlp: its parts.
        pre_attention, post_attention, pre_mlp, post_mlp: norms of what goes in and comes out.
        is_parallel: whether the MLP reads what attention reads, under a norm of its own if it has
            one, and both are added at once.
        scale: what the outputs of attention and MLP are multiplied by before they are added.
        kind: "full_attention" or "sliding_attention", which mask and which positions it has.
    """

    attention: Attention
    mlp: MLP
    pre_attention: Norm | None
    post_attention: Norm | None
    pre_mlp: Norm | None
    post_mlp: Norm | None
    is_parallel: bool
    scale: float
    kind: str


@dataclass(frozen=True)
class Head:
    """What makes logits of hidden states: `softcap(linear(x) scale)`."""

    linear: nn.Linear
    scale: float
    softcap: float | None


@dataclass(frozen=True)
class Structure:
    """A decoder.

    Attributes:
        embed: the table of tokens, as a module.
        embed_scale: what embeddings are multiplied by in addition.
        project_in, project_out: linear layers before the first layer and after the last norm.
        table: of learned positions, which are added to the embeddings.
        table_offset: row of the first position.
        layers: in their order.
        norm: the last one.
        norms_stream: whether what a norm gives is also what the next update is added to.
        rotary: computes cosines and sines of positions; None where no layer turns.
        has_kinds: whether `rotary` has other angles for layers of another kind.
        has_axes: whether positions have three axes.
        interleaved, repeats: see `turn_angles`.
        head: None where logits are made otherwise; its reason is `head_reason`.
    """

    embed: nn.Module
    embed_scale: float
    project_in: nn.Module | None
    project_out: nn.Module | None
    table: nn.Embedding | None
    table_offset: int
    layers: tuple[Layer, ...]
    norm: Norm | None
    norms_stream: bool
    rotary: nn.Module | None
    has_kinds: bool
    has_axes: bool
    interleaved: bool
    repeats: bool
    head: Head | None
    head_reason: str

    def turn_angles(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """What `rotary` gives, as `mmaccel.kernels.rope_write` takes it.

        `repeats`: the model uses the first half of the angles, each for two neighbours.
        """
        if self.repeats:
            half = cos.shape[-1] // 2
            cos, sin = (a[..., :half].repeat_interleave(2, -1) for a in (cos, sin))
        return cos, sign_sine(sin, self.interleaved)


def recognise(model: Any, windows: Sequence[int | None]) -> Structure:
    """The structure of a model that `check_causal_lm` accepts.

    Args:
        model: of transformers.
        windows: sliding window of every layer, in positions; None where it sees everything.

    Raises:
        UnrecognisedError: names the first module that is not recognised.

    Cost: reads attributes; one rotation of one position.
    """
    decoder = model.get_decoder()
    for name, module in _parts(model, decoder):
        _check_plain(name, module)
    names = _names(decoder)
    _refuse_names(f"a {type(decoder).__name__}", names, _DECODER)
    kind = type(decoder).__name__
    own_stack, own_norm = _find(decoder, _STACKS), _find(decoder, _LAST_NORMS)
    stack, rotary = getattr(decoder, own_stack, ()), getattr(decoder, "rotary_emb", None)
    table, offset = _read_table(decoder, names)
    if not own_norm or not stack or len(stack) != len(windows):
        raise UnrecognisedError(f"a {kind} without layers and norm")
    if rotary is None and table is None:
        raise UnrecognisedError(f"a {kind} without rotary or learned positions")
    last = getattr(decoder, own_norm)
    project_in, project_out = (getattr(decoder, f"project_{way}", None) for way in ("in", "out"))
    parts = [part for part in (stack, last, table, project_in, project_out) if part is not None]
    _check_tensors(
        [own for part in parts for _, own in part.named_parameters(remove_duplicate=False)]
    )
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    layers = tuple(
        _read_layer(f"{own_stack}.{i}", layer, kind, rotary is not None)
        for i, (layer, kind) in enumerate(zip(stack, kinds))
    )
    norm = None if last is None else _read_norm(own_norm, last)
    norms_stream = not getattr(stack[0], "do_layer_norm_before", True)
    if norms_stream:  # the last norm of a layer is the next one's first
        firsts = [layer.pre_attention for layer in layers]
        layers = tuple(
            replace(layer, pre_attention=first) for layer, first in zip(layers, [None, *firsts])
        )
        norm = firsts[-1]
    try:
        head, reason = _read_head(model), ""
    except UnrecognisedError as error:
        head, reason = None, str(error)
    has_kinds = (
        rotary is not None
        and "layer_type" in inspect.signature(inspect.unwrap(type(rotary).forward)).parameters
    )
    interleaved = repeats = False
    if rotary is not None:
        attention = getattr(stack[0], _find(stack[0], _ATTENTIONS))
        interleaved, repeats = _find_rotation(
            attention, rotary, kinds[0] if has_kinds else None, "ndim" in names
        )
    scale = decoder.embedding_multiplier if "embedding_multiplier" in names else 1.0
    return Structure(
        decoder.get_input_embeddings(), float(scale), project_in, project_out, table, offset,
        layers, norm, norms_stream, rotary, has_kinds, "ndim" in names, interleaved, repeats,
        head, reason,
    )  # fmt: skip


def find_hook(model: Any) -> str:
    """The first module of a model's decoder or head that something watches or wraps; or empty.

    Cost: one visit of each module.
    """
    try:
        for name, module in _parts(model, model.get_decoder()):
            _check_plain(name, module)
    except UnrecognisedError as error:
        return str(error)
    return ""


def _parts(model: Any, decoder: Any) -> Iterator[tuple[str, nn.Module]]:
    yield type(model).__name__, model
    inner = getattr(model, "model", None)
    if isinstance(inner, nn.Module) and inner is not decoder:
        yield "model", inner
    yield type(decoder).__name__, decoder
    for name in (*_STACKS, *_LAST_NORMS, *_TABLES, *_OTHERS):
        part = getattr(decoder, name, None)
        if isinstance(part, nn.Module):
            yield from part.named_modules(prefix=name)
    head = model.get_output_embeddings()
    if head is not None:
        yield "lm_head", head


def _check_plain(name: str, module: nn.Module) -> None:
    """Refuse a module whose call does more than the forward of its class."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if any(getattr(hook, "__module__", "") != _THEIRS for hook in hooks):
        raise UnrecognisedError(f"a hook on {name}")
    if "forward" in vars(module) or hasattr(module, "_hf_hook"):
        raise UnrecognisedError(f"another forward in {name}")
    if module._compiled_call_impl is not None:
        raise UnrecognisedError(f"{name}, which is compiled")


def _check_tensors(parameters: Sequence[nn.Parameter]) -> None:
    """Refuse parameters that are no plain tensors, of several dtypes or devices, or shared."""
    for parameter in parameters:
        if type(parameter) is not nn.Parameter or parameter.is_meta:
            raise UnrecognisedError(f"a {type(parameter).__name__} on {parameter.device}")
        if parameter.is_inference() or parameter.is_shared() and parameter.device.type == "cpu":
            raise UnrecognisedError("parameters in shared memory or made in inference mode")
    if len(set(map(id, parameters))) < len(parameters):
        raise UnrecognisedError("layers that share parameters")
    found = {(p.dtype, p.device) for p in parameters}
    if len(found) != 1 or not next(iter(found))[0].is_floating_point:
        listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in found))
        raise UnrecognisedError(f"layers with parameters in {listed or 'no dtype'}")


def _find(module: nn.Module, names: Sequence[str]) -> str:
    """The first of these names that a module has; empty where it has none."""
    return next((name for name in names if hasattr(module, name)), "")


def _read_table(decoder: Any, names: Sequence[str]) -> tuple[nn.Embedding | None, int]:
    """The table of learned positions, and its row for the first; None where there is none."""
    own = next((name for name in _TABLES if name in names), None)
    if own is None:
        return None, 0
    table = getattr(decoder, own)
    if type(table) is nn.Embedding:
        return table, 0
    if isinstance(table, nn.Embedding) and _names(table) == _OFFSET:
        offset: Any = table.offset
        return table, int(offset)
    raise UnrecognisedError(f"{own}, a {type(table).__name__}")


def _read_layer(name: str, layer: Any, kind: str, has_rotary: bool) -> Layer:
    names = _names(layer)
    scale = float(layer.residual_multiplier) if "residual_multiplier" in names else 1.0
    own = _find(layer, _ATTENTIONS)
    residuals = _LAYERS.get(" ".join(n for n in names if n not in _DROPOUT))
    if residuals is None or not own or "mlp" in names and not hasattr(layer, "mlp"):
        raise UnrecognisedError(f"{name}, a {type(layer).__name__}, whose forward is another")
    if "use_parallel_residual" in names and layer.use_parallel_residual:
        has_own = getattr(layer, residuals.pre_mlp) is not None
        residuals = _Residuals(_IN, pre_mlp=residuals.pre_mlp if has_own else "", is_parallel=True)
    if not getattr(layer, "do_layer_norm_before", True):  # the order that `norms_stream` shifts
        residuals = _Residuals(residuals.pre_mlp, pre_mlp=residuals.pre_attention)
    attention = _read_attention(f"{name}.{own}", getattr(layer, own), has_rotary)
    if "mlp" in names:
        mlp_names = _names(layer.mlp)
        _refuse_names(f"{name}.mlp, a {type(layer.mlp).__name__}", mlp_names, _MLP)
        mlp = _read_mlp(f"{name}.mlp", layer.mlp, mlp_names)
    else:
        mlp = _read_mlp(name, layer, names)

    def norm(own: str) -> Norm | None:
        return _read_norm(f"{name}.{own}", getattr(layer, own)) if own else None

    return Layer(
        attention, mlp, norm(residuals.pre_attention), norm(residuals.post_attention),
        norm(residuals.pre_mlp), norm(residuals.post_mlp), residuals.is_parallel, scale, kind,
    )  # fmt: skip


def _read_attention(name: str, module: Any, has_rotary: bool) -> Attention:
    names = _names(module)
    kind = type(module).__name__
    _refuse_names(f"{name}, a {kind}", names, _ATTENTION)
    if ("apply_rotary_pos_emb" in names) != has_rotary:
        raise UnrecognisedError(f"{name}, a {kind} whose positions are not the decoder's")
    if getattr(module, "qk_layernorm", False):
        raise UnrecognisedError(f"{name}, a {kind} with a norm for each head")
    config = module.config
    is_eager = config._attn_implementation == "eager"
    if is_eager and getattr(module, "reorder_and_upcast_attn", False):
        raise UnrecognisedError(f"{name}, a {kind} whose scores are float32")
    packed = next((n for n in ("qkv_proj", "query_key_value", "c_attn") if n in names), None)
    projections = _read_linears(name, module, (packed,) if packed else _UNPACKED)
    own_out = next(n for n in ("o_proj", "dense", "c_proj", "out_proj") if n in names)
    (out,) = _read_linears(name, module, (own_out,))
    width = module.head_size if "head_size" in names else module.head_dim
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    grouped = packed == "query_key_value"
    if "multi_query" in names:
        kv_heads, grouped = (1, False) if module.multi_query else (heads, True)
    rows, columns = sum(_count_outputs(linear) for linear in projections), heads * width
    if rows != columns + 2 * kv_heads * width or _count_inputs(out) != columns:
        raise UnrecognisedError(f"{name}, a {kind} whose heads differ in width")
    has_norms = "q_norm" in names and getattr(module, "use_qk_norm", True)
    softcap = module.attn_logit_softcapping if "attn_logit_softcapping" in names else None
    return Attention(
        projections, grouped, out, _read_head_norms(name, module) if has_norms else None, heads,
        kv_heads, width, float(module.scaling), softcap, has_rotary and _turns(module, names),
    )  # fmt: skip


def _turns(module: Any, names: Sequence[str]) -> bool:
    """Whether a layer's queries and keys have rotary positions; some models leave them out."""
    if "use_rope" in names:
        return bool(module.use_rope)
    if "sliding_window" not in names:
        return True
    if names.index("sliding_window") > names.index("apply_rotary_pos_emb"):
        return True  # it is passed on to attention alone
    is_sliding = module.sliding_window is not None
    return not is_sliding or bool(module.is_sliding) if "is_sliding" in names else is_sliding


def _read_mlp(name: str, module: Any, names: Sequence[str]) -> MLP:
    choices = (
        ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"),
        ("up_proj", "down_proj"), ("fc1", "fc2"), ("c_fc", "c_proj"),
        ("dense_h_to_4h", "dense_4h_to_h"),
    )  # fmt: skip
    own = next((names_ for names_ in choices if set(names_) <= set(names)), None)
    act = next((n for n in ("act_fn", "activation_fn", "act") if n in names), None)
    if own is None or act is None:
        raise UnrecognisedError(f"{name}, a {type(module).__name__} of another structure")
    ups = _read_linears(name, module, own[:-1])
    (out,) = _read_linears(name, module, own[-1:])
    activation = getattr(module, act)
    kind = _ACTIVATIONS.get(type(activation).__name__)
    is_gated = "gate" in own[0]
    if is_gated and kind is None or not isinstance(activation, nn.Module):
        raise UnrecognisedError(f"{name}, whose activation is {type(activation).__name__}")
    is_long = type(activation).__name__ in _LONG
    return MLP(ups, out, kind if is_gated else None, _gelu_tanh if is_long else activation)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _read_linears(name: str, module: Any, own: Sequence[str]) -> tuple[Any, ...]:
    """Plain linear layers of a module that have all a bias, or none."""
    from transformers.pytorch_utils import Conv1D

    found = [getattr(module, one, None) for one in own]
    kinds = (nn.Linear, Conv1D) if len(own) == 1 else (nn.Linear,)
    for one, linear in zip(own, found):
        if type(linear) not in kinds:
            raise UnrecognisedError(f"{name}.{one}, a {type(linear).__module__}."
                                    f"{type(linear).__name__}")  # fmt: skip
    linears: list[Any] = found
    if len({linear.bias is None for linear in linears}) > 1:
        raise UnrecognisedError(f"{name}, where only some of {', '.join(own)} have a bias")
    return tuple(linears)


def _count_inputs(linear: Any) -> int:
    return int(linear.weight.shape[0 if is_input_major(linear) else 1])


def _count_outputs(linear: Any) -> int:
    return int(linear.weight.shape[1 if is_input_major(linear) else 0])


def _read_norm(name: str, module: Any) -> Norm:
    if type(module) is nn.LayerNorm:
        return Norm(module.weight, module.bias, "layer", 0.0, module.eps)
    known = _NORMS.get(" ".join(_names(module)))
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if known is None or eps is None:
        raise UnrecognisedError(f"{name}, a {type(module).__name__}")
    return Norm(module.weight, getattr(module, "bias", None), *known, float(eps))


def _read_head_norms(name: str, module: Any) -> HeadNorms:
    q, k = (_read_norm(f"{name}.{own}", getattr(module, own)) for own in ("q_norm", "k_norm"))
    if (q.kind, q.offset, q.eps) != (k.kind, k.offset, k.eps):
        raise UnrecognisedError(f"{name}, whose norms of queries and keys differ")
    return HeadNorms(q.weight, k.weight, q.bias, k.bias, q.kind, q.offset, q.eps)


def _read_head(model: Any) -> Head:
    names = _names(model)
    body = type(model).base_model_prefix
    own = [name for name in names if name != body and not name.endswith(_HEAD_OUTPUTS)]
    _refuse_names(type(model).__name__, own, _HEAD)
    linear = model.get_output_embeddings()
    if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter:
        raise UnrecognisedError(f"a head that is a {type(linear).__name__}")
    scale, softcap = 1.0, None
    if "logit_scale" in names:
        scale = float(model.logit_scale)
    if "logits_scaling" in names:
        scale = 1.0 / float(model.config.logits_scaling)
    if "final_logit_softcapping" in names:
        softcap = model.config.final_logit_softcapping
    return Head(linear, scale, softcap)


@torch.no_grad()
def _find_rotation(
    attention: Any, rotary: Any, kind: str | None, has_axes: bool
) -> tuple[bool, bool]:
    """`interleaved` and `repeats` of a model, from what its own function does to random heads."""
    rotate = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    device, unit = next(attention.parameters()).device, torch.float32
    given = torch.empty(0, device=device, dtype=unit)
    position = torch.full((1, 1), 3, device=device)
    if has_axes:
        position = position.expand(3, 1, 1)
    cos, sin = rotary(given, position, *([] if kind is None else [kind]))
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(1, 1, 1, cos.shape[-1], generator=generator, device="cpu").to(device)
    if rotate is None:
        raise UnrecognisedError(f"a {type(attention).__name__} with a rotation of its own")
    expected, _ = rotate(heads, heads, cos, sin)
    half = cos.shape[-1] // 2
    for interleaved, repeats in ((False, False), (True, False), (True, True)):
        angles = [a[..., :half].repeat_interleave(2, -1) if repeats else a for a in (cos, sin)]
        pairs = heads.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        partner = pairs if interleaved else heads.roll(half, -1)
        found = heads * angles[0][:, None] + partner * sign_sine(angles[1], interleaved)[:, None]
        if torch.allclose(found, expected.to(unit), atol=1e-5):
            return interleaved, repeats
    raise UnrecognisedError(f"a {type(attention).__name__} with a rotation of its own")


def _names(module: nn.Module) -> tuple[str, ...]:
    """Names that a module's forward uses, in order of their first use."""
    code: Any = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or not type(module).__module__.startswith("transformers."):
        raise UnrecognisedError(f"a {type(module).__module__}.{type(module).__name__}")
    found: tuple[str, ...] = code.co_names
    return found


def _refuse_names(name: str, names: Sequence[str], known: frozenset[str]) -> None:
    others = [one for one in names if one not in known]
    if others:
        raise UnrecognisedError(f"{name}, whose forward uses {others[0]}")
