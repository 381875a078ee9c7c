"""The structure of a decoder of transformers, as the fused decoder runs it: what the row of its
class says (`fused_layers`), and sizes, biases, activation, epsilons and scales of its modules. A
module of another forward than transformers', or that something watches or wraps, has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from mmaccel.kernels.gated_act import Activation
from mmaccel.kernels.norm import HeadNorms, Norm
from mmaccel.kernels.rope_write import sign_sine
from mmaccel.pipelines.hosts.layers.attention_name import own_attention
from mmaccel.pipelines.hosts.runner.fused_layers import (
    ACTIVATIONS,
    HEADS,
    LAYERS,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
)
from mmaccel.pipelines.hosts.runner.packed_linear import PackedLinear, find_unpackable

_LONG = ("NewGELUActivation", "FastGELUActivation")  # GELU by tanh in eight operations
_GENERAL = ("torch.nn.", "transformers.activations", "transformers.pytorch_utils")
_CAPTURING = "transformers.utils.output_capturing"  # its hooks do nothing unless states are wanted

_FIXED = {"default", "linear", "llama3", "yarn", "proportional"}  # rotary angles


class UnknownDecoderError(Exception):
    """What was found instead of a structure that the fused decoder knows."""


@dataclass(frozen=True)
class Attention:
    """Attention of a layer."""

    qkv: PackedLinear  # queries, keys and values, in this order
    out: PackedLinear
    is_grouped: bool  # see `mmaccel.kernels.rope_write`
    norms: HeadNorms | None  # of queries and keys before they turn
    heads: int  # Hq
    kv_heads: int  # Hkv
    head_dim: int  # D
    scale: float  # of the scores
    softcap: float | None  # c: scores become c tanh(score / c)
    turns: bool  # queries and keys have rotary positions


@dataclass(frozen=True)
class MLP:
    """The MLP of a layer."""

    up: PackedLinear  # with the gate first, if there is one
    down: PackedLinear
    gate: Activation | None  # of the gate
    activation: Callable[[Tensor], Tensor]  # between up and down where there is no gate


@dataclass(frozen=True)
class Layer:
    """A decoder layer; its norms are of what goes in and of what comes out."""

    attention: Attention
    mlp: MLP
    pre_attention: Norm | None
    post_attention: Norm | None
    pre_mlp: Norm | None
    post_mlp: Norm | None
    is_parallel: bool  # the MLP reads what attention reads, and both are added at once
    scale: float  # of what comes out, before it is added
    kind: str  # "full_attention" or "sliding_attention": which mask and positions it has


@dataclass(frozen=True)
class Head:
    """What makes logits of hidden states: `softcap(linear(x) scale)`."""

    linear: nn.Linear
    product: PackedLinear  # the same
    scale: float
    softcap: float | None


@dataclass(frozen=True)
class Structure:
    """A decoder."""

    spec: LayerSpec
    embed: nn.Module
    embed_scale: float
    project_in: nn.Module | None
    project_out: nn.Module | None
    table: nn.Embedding | None  # of learned positions, which are added to the embeddings
    layers: tuple[Layer, ...]
    norm: Norm | None  # the last one
    norms_stream: bool  # what a norm gives is also what the next update is added to
    rotary: nn.Module | None  # cosines and sines of positions
    head: Head | None
    head_reason: str  # why there is none

    @property
    def has_fixed_angles(self) -> bool:
        """Whether angles are functions of a position alone, of one axis and for any length."""
        kinds = getattr(self.rotary, "rope_type", None)
        kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        return self.rotary is not None and not self.spec.has_axes and kinds <= _FIXED

    @property
    def takes_row_products(self) -> bool:
        """Whether all that stands around its products is what `row_product` computes with them."""
        norms = [norm for layer in self.layers for norm in (layer.pre_attention, layer.pre_mlp)]
        others = [norm for layer in self.layers for norm in (layer.post_attention, layer.post_mlp)]
        return (
            all(norm is None or (norm.kind == "rms" and norm.bias is None) for norm in norms)
            and all(norm is None for norm in others)
            and all(layer.mlp.gate is not None and not layer.is_parallel for layer in self.layers)
            and not self.norms_stream
        )

    def turn_angles(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """What `rotary` gives, as `rope_write` takes it."""
        if self.spec.repeats:
            half = cos.shape[-1] // 2
            cos, sin = (a[..., :half].repeat_interleave(2, -1) for a in (cos, sin))
        return cos, sign_sine(sin, self.spec.interleaved)


def read_structure(model: Any, windows: Sequence[int | None]) -> Structure:
    """The structure of a model that `find_facts` accepts, whose layers have these sliding windows.
    Reads attributes alone; raises UnknownDecoderError.
    """
    obstacle = find_hook(model)
    if obstacle:
        raise UnknownDecoderError(obstacle)
    decoder = find_decoder(model)
    config = decoder.config
    prefix, stack, spec = _find_layers(decoder)
    if len(stack) != len(windows):
        raise UnknownDecoderError(f"{len(stack)} layers, of which {len(windows)} are in use")
    options = [spec.attention.unless]
    if own_attention(config) == "eager":
        options.append(spec.attention.unless_eager)
    for option in options:
        if _read_option(config, option, False):
            raise UnknownDecoderError(f"attention with {option}")
    names = [prefix, spec.last_norm, spec.positions]
    names += ["project_in", "project_out"] if spec.has_projections else []
    named = {name: getattr(decoder, name) for name in names if name}
    parts = {name: part for name, part in named.items() if part is not None}
    _check_forwards(decoder, name_forward(stack[0]).partition(".")[0], parts)
    obstacle = find_unpackable(list(parts.values()))
    if obstacle:
        raise UnknownDecoderError(obstacle)

    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    layers = [_read_layer(layer, spec, config, kind) for layer, kind in zip(stack, kinds)]
    norm = _read_norm(parts.get(spec.last_norm), spec.norm)
    norms_stream = not _read_option(config, spec.residuals.stream_unless, True)
    if norms_stream:  # each norm follows its addition: a layer's last one is the next one's first
        ends = [layer.pre_mlp for layer in layers]
        layers = [
            replace(layer, pre_attention=first, pre_mlp=layer.pre_attention)
            for layer, first in zip(layers, [None, *ends])
        ]
        norm = ends[-1]
    head, head_reason = _read_head(model)
    return Structure(
        spec=spec,
        embed=decoder.get_input_embeddings(),
        embed_scale=float(_read_option(config, spec.embed_scale, 1.0)),
        project_in=parts.get("project_in"),
        project_out=parts.get("project_out"),
        table=parts.get(spec.positions),
        layers=tuple(layers),
        norm=norm,
        norms_stream=norms_stream,
        rotary=None if spec.positions else decoder.rotary_emb,
        head=head,
        head_reason=head_reason,
    )


def find_hook(model: Any) -> str:
    """The first module of a model's decoder or head that something watches or wraps; or empty."""
    decoder = find_decoder(model)
    head = model.get_output_embeddings()
    parts = [(type(module).__name__, module) for module in (model, model.base_model)]
    for name, module in decoder.named_modules():
        parts.append((name or type(decoder).__name__, module))
    if head is not None:
        parts.append(("lm_head", head))
    for name, module in parts:
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(getattr(hook, "__module__", "") != _CAPTURING for hook in hooks):
            return f"a hook on {name}"
        if "forward" in vars(module) or hasattr(module, "_hf_hook"):
            return f"another forward in {name}"
        if module._compiled_call_impl is not None:
            return f"{name}, which is compiled"
    return ""


def find_decoder(model: Any) -> Any:
    """The part that has a model's layers; a code predictor's `get_decoder` gives the whole."""
    decoder = model.get_decoder()
    return getattr(model, "model", model) if decoder is model else decoder


def name_forward(module: nn.Module) -> str:
    """The class whose forward a module runs, as the tables name it, or "PATH:CLASS" elsewhere. What
    transformers and torch wrap around it is none.
    """
    forward: Any = type(module).forward
    path = forward.__globals__["__name__"]
    while hasattr(forward, "__wrapped__") and path.startswith(("transformers.", "torch.")):
        forward = forward.__wrapped__
        path = forward.__globals__["__name__"]
    name = forward.__qualname__.removesuffix(".forward")
    models = path.removeprefix("transformers.models.")
    return f"{path}:{name}" if models == path else f"{models.partition('.')[0]}.{name}"


def _find_layers(decoder: Any) -> tuple[str, nn.ModuleList, LayerSpec]:
    """The name of a decoder's list of layers, the list, and what its layers compute."""
    lists = [(n, c) for n, c in decoder.named_children() if isinstance(c, nn.ModuleList) and len(c)]
    if not lists:
        raise UnknownDecoderError(f"a {type(decoder).__name__}, which has no list of layers")
    name, stack = lists[0]
    for layer in stack:
        if name_forward(layer) not in LAYERS:
            kind = type(layer).__name__
            raise UnknownDecoderError(f"a {kind}, which the fused decoder does not know")
    if len({name_forward(layer) for layer in stack}) > 1:
        raise UnknownDecoderError(f"layers of several classes in {name}")
    return name, stack, LAYERS[name_forward(stack[0])]


def _check_forwards(decoder: nn.Module, family: str, parts: dict[str, nn.Module]) -> None:
    """Refuse parametrizations, and forwards that are neither the family's nor general ones."""
    modules = {type(decoder).__name__: decoder}
    for name, part in parts.items():
        modules |= dict(part.named_modules(prefix=name))
    for name, module in modules.items():
        is_known = name_forward(module).startswith((f"{family}.", *_GENERAL))
        if not is_known or is_parametrized(module):
            kind = f"{type(module).__module__}.{type(module).__name__}"
            raise UnknownDecoderError(f"{name}, a {kind}")


def _read_option(config: Any, name: str, default: Any) -> Any:
    return getattr(config, name) if name else default


def _read_layer(layer: Any, spec: LayerSpec, config: Any, kind: str) -> Layer:
    def norm(name: str) -> Norm | None:
        return _read_norm(getattr(layer, name), spec.norm) if name else None

    residuals = spec.residuals
    return Layer(
        attention=_read_attention(getattr(layer, spec.attention.name), spec, config, kind),
        mlp=_read_mlp(getattr(layer, spec.mlp.name) if spec.mlp.name else layer, spec.mlp),
        pre_attention=norm(residuals.pre_attention),
        post_attention=norm(residuals.post_attention),
        pre_mlp=norm(residuals.pre_mlp),
        post_mlp=norm(residuals.post_mlp),
        is_parallel=_read_option(config, residuals.parallel_if, residuals.is_parallel),
        scale=float(_read_option(config, residuals.scale, 1.0)),
        kind=kind,
    )


def _read_attention(module: Any, layer: LayerSpec, config: Any, kind: str) -> Attention:
    spec = layer.attention
    qkv = PackedLinear([getattr(module, name) for name in spec.qkv])
    out = PackedLinear([getattr(module, spec.out)])
    heads = config.num_attention_heads
    head_dim = out.shape[1] // heads
    norms = None
    if spec.norm is not None and _read_option(config, spec.norm_if, True):
        q, k = _read_norm(module.q_norm, spec.norm), _read_norm(module.k_norm, spec.norm)
        assert q is not None and k is not None
        if q.eps != k.eps:
            raise UnknownDecoderError("norms of queries and keys that differ")
        norms = HeadNorms(q.weight, k.weight, q.bias, k.bias, q.kind, q.offset, q.eps)
    turns = not layer.positions
    if spec.turns_if:
        turns = bool(getattr(module, spec.turns_if))
    if spec.turns_where_sliding:
        turns = kind == "sliding_attention" or config.sliding_window is None
    return Attention(
        qkv=qkv,
        out=out,
        is_grouped=spec.is_grouped,
        norms=norms,
        heads=heads,
        kv_heads=(qkv.shape[0] // head_dim - heads) // 2,
        head_dim=head_dim,
        scale=float(module.scaling),
        softcap=_read_option(config, spec.softcap, None),
        turns=turns,
    )


def _read_mlp(module: Any, spec: MLPSpec) -> MLP:
    activation = getattr(module, spec.activation)
    kind = type(activation).__name__
    if spec.is_gated and kind not in ACTIVATIONS:
        raise UnknownDecoderError(f"a gate whose activation is {kind}")
    return MLP(
        up=PackedLinear([getattr(module, name) for name in spec.up]),
        down=PackedLinear([getattr(module, spec.down)]),
        gate=ACTIVATIONS[kind] if spec.is_gated else None,
        activation=_gelu_tanh if kind in _LONG else activation,
    )


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _read_norm(module: Any, spec: NormSpec) -> Norm | None:
    if module is None:
        return None
    bias = module.bias if spec.has_bias else None
    return Norm(module.weight, bias, spec.kind, spec.offset, float(getattr(module, spec.eps)))


def _read_head(model: Any) -> tuple[Head | None, str]:
    kind = type(model).__name__
    linear = model.get_output_embeddings()
    forward = name_forward(model)
    spec = HEADS.get(forward, HeadSpec())
    if ":" in forward:
        return None, f"a {kind}, which the fused decoder does not know"
    if spec.other:
        return None, f"a {kind}, whose head {spec.other}"
    if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter:
        return None, f"a head that is a {type(linear).__name__}"
    scale = float(_read_option(model.config, spec.scale, 1.0))
    scale /= float(_read_option(model.config, spec.divisor, 1.0))
    softcap = _read_option(model.config, spec.softcap, None)
    return Head(linear, PackedLinear([linear]), scale, softcap), ""
