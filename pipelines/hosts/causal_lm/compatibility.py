"""Which transformers models decode in windows, what is known of each, what a window takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mmaccel.catalog import LATENT_SPEECH
from mmaccel.checks import check_choice, check_int
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.layers.attention_name import own_attention
from mmaccel.pipelines.hosts.transformers_release import CACHE, cache_argument
from mmaccel.reduction.kv_cache.contract import LayerSizes
from mmaccel.samplers.run_lock import in_turn

_NEEDED = ("input_ids", "attention_mask", "position_ids")
_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer"}
_NEED_CONTIGUOUS_KEYS = ("gpt_neox_japanese",)  # model types whose attention takes no views
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_IMPLEMENTATIONS = ("sdpa", "eager")  # those that take a 4-D mask of numbers as it is
_ATTENTIONS = ("auto", "model", "kernel")

_READ = (  # fields of a decoder's configuration that facts are read from, beside its attention
    "num_hidden_layers",
    "max_position_embeddings",
    "rope_parameters",
    "sliding_window",
    "layer_types",
    "attention_chunk_size",
    "is_decoder",
)

_found: WeakKeyDictionary[nn.Module, tuple[Any, ModelFacts]] = WeakKeyDictionary()


@dataclass(frozen=True)
class ModelFacts:
    """What all calls of a model have in common, wherever its weights are."""

    config: Any  # the part of the configuration that describes the decoder
    windows: Sequence[int | None]  # positions that each layer sees; None: all
    n_ids: int  # V, of the whole head
    max_positions: int | None = None
    cache_argument: str = CACHE  # how the model's forward names its cache
    # arguments by which a forward computes the last position's logits alone; empty without any
    last_only: Mapping[str, Any] = field(default_factory=dict)


def find_facts(model: Any) -> ModelFacts:
    """The facts of a decoder-only transformers model with ordinary attention in every layer; found
    again where its head or a field of its configuration that they are read from has changed.

    Raises:
        UnsupportedModelError: another model, with the reason.
    """
    expected = "a transformers causal LM with ordinary attention in every layer"
    if not isinstance(model, nn.Module) or getattr(model, "config", None) is None:
        raise UnsupportedModelError(
            f"model: expected {expected}, received {type(model).__name__}; {find_remedy(model)}"
        )
    return _find_facts(model, expected)


@in_turn
def _find_facts(model: Any, expected: str) -> ModelFacts:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    config = text_config(model)
    n_ids = 0 if find_linear(head) is None else count_ids(head)
    fields = [repr(getattr(config, name, None)) for name in _READ]
    state = (type(head), n_ids, own_attention(config), *fields)
    known = _found.get(model)
    if known is not None and known[0] == state:
        return known[1]
    layers: list[Any] = []
    obstacle = _find_obstacle(model, head, layers)
    if obstacle is not None:
        received, remedy = obstacle
        raise UnsupportedModelError(
            f"model: expected {expected}, received {type(model).__name__}, {received}; {remedy}"
        )
    parameters = forward_parameters(model)
    facts = ModelFacts(
        config,
        _windows(layers),
        n_ids,
        find_position_limit(model),
        cache_argument(parameters) or CACHE,
        {"logits_to_keep": 1} if "logits_to_keep" in parameters else {},
    )
    _found[model] = state, facts
    return facts


UNSERVED = "its calls run as ever without a policy; docs/models.md lists the models that are served"


def find_remedy(model: Any) -> str:
    """What helps for an object that is not a causal LM with a head."""
    is_ours = type(model).__module__.startswith("mmaccel.")
    if is_ours and hasattr(type(model), "from_pretrained"):
        return "give the policy to its call: pipe(..., policy=policy)"
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if hasattr(model, "enable_cache"):
        return "it makes no tokens; its own enable_cache(...) makes it faster, or cache-dit"
    if type(model).__module__.startswith("diffusers."):
        return "it makes no tokens; fewer num_inference_steps make its pipeline faster"
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind is None:
        return "load one with AutoModelForCausalLM.from_pretrained"
    other = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, type(model).__name__)
    if other == type(model).__name__:
        return UNSERVED
    return "load it with AutoModelForCausalLM.from_pretrained"


def text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def find_position_limit(model: Any) -> int | None:
    """How many positions a model's passes may have; None where it names no limit. "longrope" ends
    at the length of pretraining, beyond which it turns otherwise, and earlier keys no longer fit.
    """
    config = text_config(model)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    limits = [getattr(config, "max_position_embeddings", None)]
    limits += [
        kind.get("original_max_position_embeddings")
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def find_layer_sizes(config: Any) -> LayerSizes:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return LayerSizes(config.num_hidden_layers, heads, config.hidden_size)


def find_device(model: Any) -> torch.device:
    """Where tokens go in and logits come out: of accelerate's hook, else the first parameter's."""
    hook = vars(model).get("_hf_hook")
    for each in getattr(hook, "hooks", (hook,)):
        if getattr(each, "execution_device", None) is not None:
            return torch.device(each.execution_device)
    device: torch.device | None = getattr(model, "device", None)
    return next(model.parameters()).device if device is None else device


def find_linear(head: Any) -> Any:
    """The linear layer of a language-modelling head; None where there is none."""
    for name in ("base_layer", "original_module"):  # peft: an adapter, a layer that is trained
        head = getattr(head, name, head)
    if isinstance(head, nn.Linear):
        return head
    is_dynamic = type(head).__module__.startswith("torch.ao.nn.quantized.dynamic")
    return head if is_dynamic and hasattr(head, "weight") else None


def count_ids(head: Any) -> int:
    """V, the ids of a head that `find_linear` knows."""
    linear = find_linear(head)
    return int(linear.weight.shape[0] if isinstance(linear, nn.Linear) else linear.out_features)


def read_weight(head: Any) -> Tensor:
    """The matrix `[V, H]` of a head that `find_linear` knows, without adapters."""
    linear = find_linear(head)
    weight: Any = linear.weight
    if callable(weight) and not isinstance(weight, Tensor):  # torch.ao.quantization
        weight = weight().dequantize()
    if weight.device.type == "meta" and getattr(linear, "_hf_hook", None) is not None:
        weight = linear._hf_hook.weights_map["weight"]  # accelerate keeps it elsewhere
    return cast(Tensor, weight)


def name_head(model: Any, n_rows: int, n_ids: int) -> str:
    """The name of a head of which some rows alone can be computed; empty where all are."""
    head = model.get_output_embeddings()
    has_hook = getattr(head, "_hf_hook", None) is not None  # which brings the whole head
    if n_rows >= n_ids or not isinstance(head, nn.Linear) or has_hook:
        return ""
    return next(name for name, module in model.named_modules() if module is head)


def take_rows(model: Any, name: str, rows: Any) -> dict[str, Tensor]:
    """Weight and bias of some rows of a head that `name_head` names, by full name; or nothing."""
    if not name:
        return {}
    head = model.get_submodule(name)
    taken = {f"{name}.weight": head.weight[rows]}
    if head.bias is not None:
        taken[f"{name}.bias"] = head.bias[rows]
    return taken


def forward_parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    return _parameters(type(model).forward)


@cache
def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def find_training_effect(model: nn.Module) -> str | None:
    """What training mode changes about a model's passes; None if nothing."""
    training = _in_training(model)
    if any(isinstance(module, _DROPOUT) and module.p > 0 for module in training):
        return "dropout"
    if model.training:
        options: dict[str, Any] = text_config(model).to_dict()
        rates = [value for name, value in options.items() if "drop" in name]
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            return "dropout"
    if any(getattr(module, "gradient_checkpointing", False) for module in training):
        return "gradient checkpointing, which leaves the cache out"
    return None


def _in_training(model: nn.Module) -> list[nn.Module]:
    training = []
    unvisited = [model]  # `model.modules()` also builds names, at every call
    while unvisited:
        module = unvisited.pop()
        unvisited += [child for child in module._modules.values() if child is not None]
        if module.training:
            training.append(module)
    return training


def _find_obstacle(model: Any, head: Any, layers: list[Any]) -> tuple[str, str] | None:
    """(what the model is instead, remedy); None where it passes, with its cache's `layers`."""
    other = "use another model, or write a family for it (docs/attach.md)"
    if getattr(model.config, "model_type", None) in LATENT_SPEECH:
        return (
            "whose frames of sound are continuous latents: no token of them has a probability by "
            "which a draft could be verified",
            "its calls run as ever without a policy; docs/speech.md says what makes them faster",
        )
    config = text_config(model)
    if getattr(model.config, "is_encoder_decoder", False) or getattr(
        config, "add_cross_attention", False
    ):
        return "which has an encoder or attends to one", "use a decoder-only model"
    if find_linear(head) is None:
        return "which has no linear language-modelling head", find_remedy(model)
    parameters = forward_parameters(model)
    lacking = [name for name in _NEEDED if name not in parameters]
    lacking += ["cache"] if cache_argument(parameters) is None else []
    if lacking:
        return f"whose forward takes no {' nor '.join(lacking)}", other
    layers += _layers(model)
    others = sorted({type(layer).__name__ for layer in layers} - _LAYERS)
    if others or getattr(model, "_is_stateful", False):
        return (
            f"whose cache has layers of other kinds ({', '.join(others) or 'recurrent ones'})",
            "use a model without recurrent, chunked or shared layers, or write a family for it "
            "(docs/attach.md)",
        )
    if getattr(config, "attention_chunk_size", None) is not None:
        return "whose attention is chunked", other
    decoder: Any = type(model.get_decoder())  # of a vision-language model: that of its text
    if len(set(_windows(layers))) > 1 and not _source_has(decoder, "attention_mask, dict)"):
        return "whose layers see different positions, but whose forward takes one mask", other
    if any(_windows(layers)) and not _source_has(decoder, "sliding"):
        return "whose cache slides, but whose masks do not", other
    if getattr(config, "alibi", False):
        return "which takes positions from the attention mask (ALiBi)", other
    if getattr(config, "is_decoder", True) is False and _has_two_sided_attention(model):
        return "which attends in both directions", "set config.is_decoder=True before loading it"
    if getattr(config, "model_type", None) in _NEED_CONTIGUOUS_KEYS:
        return "whose attention needs keys that lie in one piece", other
    implementation = own_attention(config)
    if implementation not in _IMPLEMENTATIONS:
        return (
            f"whose attention is {implementation!r}",
            "call model.set_attn_implementation('sdpa')",
        )
    return None


def _layers(model: Any) -> list[Any]:
    from transformers.cache_utils import DynamicCache

    return DynamicCache(config=text_config(model)).layers


def _windows(layers: list[Any]) -> list[int | None]:
    return [getattr(layer, "sliding_window", None) for layer in layers]


@cache
def _source_has(decoder: Any, words: str) -> bool:
    """Whether the source of a decoder's forward has these words: no signature tells its masks."""
    try:
        return words in inspect.getsource(decoder.forward)
    except (OSError, TypeError):  # the source is not available
        return False


def _has_two_sided_attention(model: nn.Module) -> bool:
    return any(getattr(module, "is_causal", True) is False for module in model.modules())


def check_options(vocab_size: int | None, full: int, stride: Any, attention: str) -> None:
    if vocab_size is not None:
        check_int("vocab_size", vocab_size, 1, full, hint=f"None keeps all {full} ids")
    if stride not in ("auto", None):
        check_int("stride", stride, 1, hint='try 64, None or "auto"')
    check_choice("attention", attention, _ATTENTIONS, hint="auto takes the kernel on GPUs")


def check_mode(model: nn.Module) -> None:
    received = find_training_effect(model)
    if received is not None:
        raise OptionError(
            f"model: expected evaluation mode, received training mode with {received}; "
            "call model.eval()"
        )


def check_capacity(rows: int, positions: int, max_positions: int | None) -> None:
    if rows < 1 or positions < 1:
        raise OptionError(
            f"reserve: expected at least 1 row and 1 position, received {rows} and "
            f"{positions}; ask for more"
        )
    if max_positions is not None and positions > max_positions:
        raise OptionError(
            f"positions: expected at most {max_positions} (the model's max_position_embeddings), "
            f"received {positions}; shorten the prompt or ask for fewer tokens"
        )
