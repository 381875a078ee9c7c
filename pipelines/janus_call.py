"""A call of Janus' picture loop, prepared by the library's own code up to its first pass."""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from mmaccel.errors import MMAccelError
from mmaccel.pipelines.inject import original

_REPLACED = ("_get_logits_processor", "prepare_inputs_for_generation")
_HEEDED = {"inputs_embeds", "is_first_iteration", "use_cache", "guidance_scale", "logits_to_keep"}


class _Prepared(MMAccelError):
    """Raised where the library would run its first pass."""


def prepare_picture(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> SimpleNamespace:
    """What the library's own code makes of a call, up to its first pass.

    Lists are copied, as the library appends to the caller's.

    Returns:
        config, processors, others (names of arguments nobody heeds), ids `[B, T]` as they were
        given, tokens `[2 B, T]` with the rows for guidance, mask `[2 B, T]` bool.
    """
    from transformers import DynamicCache

    seen = SimpleNamespace()
    make = model._get_logits_processor

    def note_processors(generation_config: Any, **others: Any) -> Any:
        seen.config, seen.ids = generation_config, others["encoder_input_ids"]
        seen.processors = make(generation_config=generation_config, **others)
        return seen.processors

    def stop(  # the names tell the library which arguments it may pass on
        input_ids: Tensor, attention_mask: Tensor, past_key_values: Any = None, **kwargs: Any
    ) -> Any:
        given = {name for name, value in kwargs.items() if value is not None}
        seen.others = sorted(given - _HEEDED)
        seen.tokens, seen.mask = input_ids, attention_mask.bool()
        raise _Prepared

    lists = [copy(value) if isinstance(value, list) else value for value in args]
    named = {k: copy(v) if isinstance(v, list) else v for k, v in options.items()}
    before = {name: vars(model)[name] for name in _REPLACED if name in vars(model)}
    model._get_logits_processor, model.prepare_inputs_for_generation = note_processors, stop
    try:
        # with a cache at hand none is prepared: we need none, and 5.17 cannot
        original(model, "generate")(*lists, **{**named, "past_key_values": DynamicCache()})
    except _Prepared:
        pass
    finally:
        del model._get_logits_processor, model.prepare_inputs_for_generation
        vars(model).update(before)
    seen.ids = seen.tokens[: seen.tokens.shape[0] // 2]
    return seen
