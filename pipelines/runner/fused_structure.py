"""What a decoder is made of, as the fused decoder runs it: found by structure, not by family.

transformers writes the same layer out once a model. So what a layer does is read from what its
`forward` names, and from the modules it holds: a name that is not known here (a clamp, a router, an
attention scale that depends on the length) means that the model keeps its own forward. A structure
found here is a claim; `mmaccel.pipelines.causal_lm.self_check` compares its logits with the model's
own before it is used.

Source: the decoders of transformers 5.17 to 5.23.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.kernels.add_norm import NormKind
from mmaccel.kernels.gated_act import Activation
from mmaccel.kernels.rope_write import sign_sine

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
    "qk_layernorm q_layernorm k_layernorm rotary_ndims torch cat".split()
)
_MLP = frozenset(
    "down_proj gate_proj up_proj gate_up_proj chunk act_fn activation_fn act fc1 fc2 c_fc c_proj "
    "nn functional dropout residual_dropout training".split()
)
_DROPOUT = frozenset(
    "dropout resid_dropout resid_attn_dropout resid_mlp_dropout residual_multiplier".split()
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
}
_DECODER = frozenset(
    "ValueError embed_tokens DynamicCache config get_seq_length torch arange shape device "
    "unsqueeze expand ndim view isinstance dict copy set enumerate create_causal_mask "
    "create_sliding_window_causal_mask sliding_window has_sliding_layers layer_types "
    "num_hidden_layers layers norm final_layernorm rotary_emb BaseModelOutputWithPast "
    "CwmModelOutputWithPast jit is_tracing embedding_multiplier nn functional dropout "
    "embedding_dropout embed_dropout training use_bidirectional_attention "
    "_bidirectional_window_overlay "
    # images in the prompt, which another pass has processed
    "get get_image_features pooler_output get_placeholder_mask masked_scatter".split()
)
_HEAD = frozenset(
    "model last_hidden_state slice_logits_to_keep isinstance int slice lm_head loss_function "
    "config text_config vocab_size past_key_values hidden_states attentions image_hidden_states "
    "rope_deltas logit_scale logits_scaling final_logit_softcapping torch tanh".split()
)
_HEAD_OUTPUT = "OutputWithPast"  # how the names of a head's output class end
_ACTIVATIONS: dict[str, Activation] = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELU": "gelu", "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
}  # fmt: skip
_THEIRS = "transformers.utils.output_capturing"  # its hooks do nothing unless states are wanted


class UnrecognisedError(Exception):
    """What was found instead of a structure that the fused decoder knows."""


@dataclass(frozen=True)
class Norm:
    """A norm of hidden states or of heads.

    Attributes:
        weight, bias: the norm's own parameters, or None.
        kind, offset, eps: as in `mmaccel.kernels.add_norm`.
    """

    weight: Tensor | None
    bias: Tensor | None
    kind: NormKind
    offset: float
    eps: float


@dataclass(frozen=True)
class Attention:
    """Attention of a layer.

    Attributes:
        projections: linear layers whose outputs are queries, keys and values, in this order.
        out: the linear layer after the heads.
        q_norm, k_norm: norms of queries and keys before they turn, or None.
        heads, kv_heads, head_dim: Hq, Hkv, D.
        scale: of the scores.
        softcap: c, scores become `c tanh(score / c)`; None: as they are.
        turns: whether queries and keys have rotary positions.
    """

    projections: tuple[nn.Linear, ...]
    out: nn.Linear
    q_norm: Norm | None
    k_norm: Norm | None
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
        activation: the module between up and down where there is no gate.
    """

    projections: tuple[nn.Linear, ...]
    out: nn.Linear
    gate: Activation | None
    activation: nn.Module


@dataclass(frozen=True)
class Layer:
    """A decoder layer.

    Attributes:
        attention, mlp: its parts.
        pre_attention, post_attention, pre_mlp, post_mlp: norms of what goes in and comes out.
        is_parallel: whether the MLP reads what attention reads, and both are added at once.
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
        layers: in their order.
        norm: the last one.
        rotary: computes cosines and sines of positions.
        has_kinds: whether `rotary` has other angles for layers of another kind.
        has_axes: whether positions have three axes.
        interleaved, repeats: see `turn_angles`.
        head: None where logits are made otherwise; its reason is `head_reason`.
    """

    embed: nn.Module
    embed_scale: float
    layers: tuple[Layer, ...]
    norm: Norm
    rotary: nn.Module
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
    names, stack = _names(decoder), getattr(decoder, "layers", None)
    _refuse_names(f"a {type(decoder).__name__}", names, _DECODER)
    rotary, norm = getattr(decoder, "rotary_emb", None), getattr(decoder, "norm", None)
    norm = norm or getattr(decoder, "final_layernorm", None)
    if stack is None or rotary is None or norm is None or len(stack) != len(windows):
        raise UnrecognisedError(f"a {type(decoder).__name__} without layers, rotary_emb and norm")
    _check_tensors([*stack.parameters(), *norm.parameters()])
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    has_kinds = "layer_type" in inspect.signature(inspect.unwrap(type(rotary).forward)).parameters
    layers = tuple(
        _read_layer(f"layers.{i}", layer, kind) for i, (layer, kind) in enumerate(zip(stack, kinds))
    )
    try:
        head, reason = _read_head(model), ""
    except UnrecognisedError as error:
        head, reason = None, str(error)
    first = stack[0].self_attn
    interleaved, repeats = _find_rotation(
        first, rotary, kinds[0] if has_kinds else None, "ndim" in names
    )
    scale = decoder.embedding_multiplier if "embedding_multiplier" in names else 1.0
    return Structure(
        decoder.get_input_embeddings(), float(scale), layers, _read_norm("norm", norm), rotary,
        has_kinds, "ndim" in names, interleaved, repeats, head, reason,
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
    for name in ("layers", "embed_tokens", "norm", "final_layernorm", "rotary_emb"):
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
    found = {(p.dtype, p.device) for p in parameters}
    if len(found) != 1 or not next(iter(found))[0].is_floating_point:
        listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in found))
        raise UnrecognisedError(f"layers with parameters in {listed or 'no dtype'}")


def _read_layer(name: str, layer: Any, kind: str) -> Layer:
    names = _names(layer)
    scale = float(layer.residual_multiplier) if "residual_multiplier" in names else 1.0
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    residuals = _LAYERS.get(" ".join(n for n in names if n not in _DROPOUT))
    if residuals is None or attention is None or mlp is None:
        raise UnrecognisedError(f"{name}, a {type(layer).__name__}, whose forward is another")
    if "use_parallel_residual" in names and layer.use_parallel_residual:
        residuals = _Residuals(_IN, is_parallel=True)

    def norm(own: str) -> Norm | None:
        return _read_norm(f"{name}.{own}", getattr(layer, own)) if own else None

    return Layer(
        _read_attention(f"{name}.self_attn", attention), _read_mlp(f"{name}.mlp", mlp),
        norm(residuals.pre_attention), norm(residuals.post_attention), norm(residuals.pre_mlp),
        norm(residuals.post_mlp), residuals.is_parallel, scale, kind,
    )  # fmt: skip


def _read_attention(name: str, module: Any) -> Attention:
    names = _names(module)
    _refuse_names(f"{name}, a {type(module).__name__}", names, _ATTENTION)
    if "apply_rotary_pos_emb" not in names:
        raise UnrecognisedError(f"{name}, a {type(module).__name__} without rotary positions")
    if getattr(module, "qk_layernorm", False):
        raise UnrecognisedError(f"{name}, a {type(module).__name__} with a norm for each head")
    packed = "qkv_proj" in names
    own = ("qkv_proj",) if packed else ("q_proj", "k_proj", "v_proj")
    projections = _read_linears(name, module, own)
    (out,) = _read_linears(name, module, ("o_proj" if "o_proj" in names else "dense",))
    width = module.head_dim
    config = module.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    rows = sum(linear.out_features for linear in projections)
    if rows != (heads + 2 * kv_heads) * width or out.in_features != heads * width:
        raise UnrecognisedError(f"{name}, a {type(module).__name__} whose heads differ in width")
    has_norms = "q_norm" in names and getattr(module, "use_qk_norm", True)
    norms = [
        _read_norm(f"{name}.{own}", getattr(module, own)) if has_norms else None
        for own in ("q_norm", "k_norm")
    ]
    softcap = module.attn_logit_softcapping if "attn_logit_softcapping" in names else None
    return Attention(
        projections, out, norms[0], norms[1], heads, kv_heads, width, float(module.scaling),
        softcap, _turns(module, names),
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


def _read_mlp(name: str, module: Any) -> MLP:
    names = _names(module)
    _refuse_names(f"{name}, a {type(module).__name__}", names, _MLP)
    choices = (
        ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"),
        ("up_proj", "down_proj"), ("fc1", "fc2"), ("c_fc", "c_proj"),
    )  # fmt: skip
    own = next((names_ for names_ in choices if set(names_) <= set(names)), None)
    act = next((n for n in ("act_fn", "activation_fn", "act") if n in names), None)
    if own is None or act is None:
        raise UnrecognisedError(f"{name}, a {type(module).__name__} of another structure")
    *ups, out = _read_linears(name, module, own)
    activation = getattr(module, act)
    is_gated = "gate" in own[0]
    gate = _ACTIVATIONS.get(type(activation).__name__) if is_gated else None
    if is_gated and gate is None or not isinstance(activation, nn.Module):
        raise UnrecognisedError(f"{name}, whose activation is {type(activation).__name__}")
    return MLP(tuple(ups), out, gate, activation)


def _read_linears(name: str, module: Any, own: Sequence[str]) -> tuple[nn.Linear, ...]:
    """Plain linear layers of a module that have all a bias, or none."""
    found = [getattr(module, one, None) for one in own]
    for one, linear in zip(own, found):
        if type(linear) is not nn.Linear:
            raise UnrecognisedError(f"{name}.{one}, a {type(linear).__module__}."
                                    f"{type(linear).__name__}")  # fmt: skip
    linears: list[Any] = found
    inputs = linears[:-1] if own[-1] in ("down_proj", "fc2", "c_proj") else linears
    if len({linear.bias is None for linear in inputs}) > 1:
        raise UnrecognisedError(f"{name}, where only some of {', '.join(own)} have a bias")
    return tuple(linears)


def _read_norm(name: str, module: Any) -> Norm:
    if type(module) is nn.LayerNorm:
        return Norm(module.weight, module.bias, "layer", 0.0, module.eps)
    known = _NORMS.get(" ".join(_names(module)))
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if known is None or eps is None:
        raise UnrecognisedError(f"{name}, a {type(module).__name__}")
    return Norm(module.weight, getattr(module, "bias", None), *known, float(eps))


def _read_head(model: Any) -> Head:
    names = _names(model)
    own = [name for name in names if not name.endswith(_HEAD_OUTPUT)]
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
    example = attention.o_proj if hasattr(attention, "o_proj") else attention.dense
    device, unit = example.weight.device, torch.float32
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
