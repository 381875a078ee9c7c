"""What makes a model a causal LM that windows can be run on.

What the options and the room of a model in windows may be.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import nn

from mmaccel.errors import OptionError, UnsupportedModelError

_NEEDED = ("input_ids", "attention_mask", "position_ids", "past_key_values")
_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer"}
_VIEWING = ("gpt_neox_japanese",)  # attention of these takes no keys that are views
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_IMPLEMENTATIONS = ("sdpa", "eager")  # those that take a 4-D mask of numbers as it is


def check_causal_lm(model: Any) -> list[int | None]:
    """Refuse whatever is no decoder-only language model with ordinary attention in every layer.

    Args:
        model: a transformers model.

    Returns:
        For every attention layer its sliding window in positions, None where it has none.

    Raises:
        UnsupportedModelError: with what is in the way.
    """
    expected = "a transformers causal LM with ordinary attention in every layer"
    if not isinstance(model, nn.Module) or getattr(model, "config", None) is None:
        raise UnsupportedModelError(
            f"model: expected {expected}, received {type(model).__name__}; "
            "load one with AutoModelForCausalLM.from_pretrained"
        )
    layers: list[Any] = []
    obstacle = _find_obstacle(model, layers)
    if obstacle is not None:
        received, remedy = obstacle
        raise UnsupportedModelError(
            f"model: expected {expected}, received {type(model).__name__}, {received}; {remedy}"
        )
    return _windows(layers)


def text_config(model: Any) -> Any:
    """The part of the configuration that describes the decoder."""
    return model.config.get_text_config(decoder=True)


def is_random(model: nn.Module) -> bool:
    """Whether a part of the model is in training mode and drops activations at random."""
    for module in model.modules():
        if module.training and isinstance(module, _DROPOUT) and module.p > 0:
            return True
    if not model.training:
        return False
    options: dict[str, Any] = text_config(model).to_dict()
    drops = [value for name, value in options.items() if "drop" in name]
    return any(isinstance(value, float) and value > 0 for value in drops)


def drops_cache(model: nn.Module) -> bool:
    """Whether transformers leaves the cache out: gradient checkpointing in training mode."""
    return any(m.training and getattr(m, "gradient_checkpointing", False) for m in model.modules())


def _find_obstacle(model: Any, layers: list[Any]) -> tuple[str, str] | None:
    """(what it is instead, remedy), or None; then `layers` has been given its cache's layers."""
    other = "use another model, or write a family for it (docs/attach.md)"
    config = text_config(model)
    if getattr(model.config, "is_encoder_decoder", False) or getattr(
        config, "add_cross_attention", False
    ):
        return "which has an encoder or attends to one", "use a decoder-only model"
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Linear):
        return "which has no linear language-modelling head", "load it with AutoModelForCausalLM"
    parameters = inspect.signature(type(model).forward).parameters
    lacking = [name for name in _NEEDED if name not in parameters]
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
    decoder: Any = type(model.base_model)
    if len(set(_windows(layers))) > 1 and not _says(decoder, "attention_mask, dict)"):
        return "whose layers see different positions, but whose forward takes one mask", other
    if any(_windows(layers)) and not _says(decoder, "sliding"):
        return "whose cache slides, but whose masks do not", other
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return f"whose rotary positions change with the length ({rope['rope_type']})", other
    if getattr(config, "alibi", False):
        return "which takes positions from the attention mask (ALiBi)", other
    if getattr(config, "is_decoder", True) is False and _has_two_sided_attention(model):
        return "which attends in both directions", "set config.is_decoder=True before loading it"
    if getattr(config, "model_type", None) in _VIEWING:
        return "whose attention needs keys that lie in one piece", other
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in _IMPLEMENTATIONS:
        return (
            f"whose attention is {implementation!r}",
            "call model.set_attn_implementation('sdpa')",
        )
    return None


def _layers(model: Any) -> list[Any]:
    """The layers transformers itself would put into a cache for this model."""
    from transformers.cache_utils import DynamicCache

    return DynamicCache(config=text_config(model)).layers


def _windows(layers: list[Any]) -> list[int | None]:
    """Sliding window of every layer, None where it sees everything."""
    return [getattr(layer, "sliding_window", None) for layer in layers]


@cache
def _says(decoder: Any, words: str) -> bool:
    """Whether the source of a decoder's forward has these words.

    What masks it makes, and takes, is in no signature; transformers' own all say it alike.
    """
    try:
        return words in inspect.getsource(decoder.forward)
    except (OSError, TypeError):  # no source at hand
        return False


def _has_two_sided_attention(model: nn.Module) -> bool:
    return any(getattr(module, "is_causal", True) is False for module in model.modules())


ATTENTIONS = ("auto", "model", "twin")


def check_options(vocab_size: int | None, full: int, stride: Any, attention: str) -> None:
    """Refuse options of a window whose head has `full` ids.

    Raises:
        OptionError: with what is allowed.
    """
    if vocab_size is not None and not 1 <= vocab_size <= full:
        raise OptionError(
            f"vocab_size: expected 1..{full}, received {vocab_size}; None keeps all {full} ids"
        )
    if stride not in ("auto", None) and int(stride) < 1:
        raise OptionError(f'stride: expected at least 1, None or "auto", received {stride}; try 64')
    check_attention(attention)


def check_attention(attention: str) -> None:
    """Refuse another attention than the three.

    Raises:
        OptionError: with what is allowed.
    """
    if attention not in ATTENTIONS:
        raise OptionError(
            f"attention: expected one of {', '.join(ATTENTIONS)}, received {attention!r}; auto "
            "takes the kernel on GPUs"
        )


def check_mode(model: nn.Module) -> None:
    """Refuse a model in training mode whose passes would not be what they are in evaluation.

    Raises:
        OptionError: it drops at random, or leaves the cache out.
    """
    received = "dropout" if is_random(model) else None
    if received is None and drops_cache(model):
        received = "gradient checkpointing, which leaves the cache out"
    if received is not None:
        raise OptionError(
            f"model: expected evaluation mode, received training mode with {received}; "
            "call model.eval()"
        )


def check_room(rows: int, positions: int, most: int | None) -> None:
    """Refuse room for nothing, or for more than `most` positions.

    Raises:
        OptionError: with what is allowed.
    """
    if rows < 1 or positions < 1:
        raise OptionError(
            f"reserve: expected at least 1 row and 1 position, received {rows} and "
            f"{positions}; ask for more"
        )
    if most is not None and positions > most:
        raise OptionError(
            f"positions: expected at most {most} (the model's max_position_embeddings), received "
            f"{positions}; shorten the prompt or ask for fewer tokens"
        )
