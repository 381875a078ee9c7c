"""Which logits processors of transformers can look at a whole window, and how.

- flat: look at one position's scores and nothing else; all positions of a window go through them at
  once.
- window: read the tokens before the position too, and have a form that answers for all positions of
  a window at once.
- prefix: also read the tokens before the position; called once per position, with the prefix that
  stands there.
- refused: remember earlier calls, so that asking about a draft would change what they say later.

Processors are told apart by exact class, since a child may do anything. One that transformers does
not define counts as prefix if trial calls of a copy leave it as it was, see
`mmaccel.pipelines.processor_trials`; so does a function that says which tokens a prefix allows. All
else is refused: what cannot be looked into may remember.
"""

from __future__ import annotations

import inspect
import types
from functools import partial
from typing import Any, Literal

from torch import Tensor

from mmaccel.pipelines.processor_trials import try_allowed, try_function, try_object
from mmaccel.pipelines.repetition_aware import RepetitionAwareSampling
from mmaccel.pipelines.repetition_penalty import WindowedRepetitionPenalty, punish_prefix
from mmaccel.samplers.filters import Processor

Kind = Literal["flat", "window", "prefix"]

_HOME = "transformers.generation.logits_process"
_FLAT = {
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
}
_PREFIX = {
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "WatermarkLogitsProcessor",
}


def is_own(processor: Any, name: str) -> bool:
    """Whether the processor is of exactly that class of transformers."""
    return type(processor).__module__ == _HOME and type(processor).__name__ == name


def is_users(processor: Any) -> bool:
    """Whether it is called prefix by prefix, and neither transformers nor this library wrote it."""
    return find_window_form(processor) is None and type(processor).__module__ != _HOME


def find_window_form(processor: Any) -> Processor | None:
    """What answers for a whole window in the place of a processor, if there is such a thing."""
    if type(processor) in (RepetitionAwareSampling, WindowedRepetitionPenalty):
        return processor.over_window
    if is_own(processor, "RepetitionPenaltyLogitsProcessor"):
        ignored = processor.prompt_ignore_length
        if ignored is None or isinstance(ignored, int):  # else one per row
            return partial(punish_prefix, penalty=processor.penalty, ignored=ignored or 0)
    return None


def find_kind(processor: Any, ids: Tensor, scores: Tensor) -> Kind | str:
    """Sort a processor.

    Args:
        processor: as found in transformers' list.
        ids: `[B, T]` int64, the prompt.
        scores: `[B, V]` float32, anything, for the trial calls.

    Returns:
        "flat", "window", "prefix", or the reason why it is refused.
    """
    if find_window_form(processor) is not None:
        return "window"
    name = type(processor).__name__
    if is_own(processor, "PrefixConstrainedLogitsProcessor"):
        return try_allowed(processor._prefix_allowed_tokens_fn, ids)
    if type(processor).__module__ == _HOME:
        return "flat" if name in _FLAT else "prefix" if name in _PREFIX else f"a {name}"
    if len(inspect.signature(processor.__call__).parameters) > 2:
        return f"a {name}, which takes more than ids and scores"
    if isinstance(processor, types.FunctionType):
        return try_function(processor, ids, scores)
    kind = type(processor)
    has_slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    is_python = isinstance(inspect.getattr_static(kind, "__call__"), types.FunctionType)
    if has_slots or not is_python:  # bound methods, partials, compiled objects
        return f"a {name}, which may remember earlier calls"
    return try_object(processor, ids, scores)
