"""Which logits processors of transformers can look at a whole window, and how.

- flat: look at one position's scores and nothing else; all positions of a window go through them at
  once.
- window: read the tokens before the position too, and have a form that answers for all positions of
  a window at once.
- prefix: also read the tokens before the position; called once per position, with the prefix that
  stands there.
- refused: remember earlier calls, so that asking about a draft would change what they say later.

Processors are told apart by exact class, since a child may do anything. One that transformers does
not define counts as prefix if everything it holds is plain data and two trial calls leave it as it
was; a function, if its closure is plain data and two equal calls answer alike. All else is refused:
what cannot be looked into may remember. A function that keeps its memory in a global variable or a
random generator is found only if the two calls differ.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

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
    "PrefixConstrainedLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "WatermarkLogitsProcessor",
}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, torch.device, torch.dtype)
_BOXES = (list, tuple, set, frozenset, deque)


def is_own(processor: Any, name: str) -> bool:
    """Whether the processor is of exactly that class of transformers."""
    return type(processor).__module__ == _HOME and type(processor).__name__ == name


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
    if type(processor).__module__ == _HOME:
        return "flat" if name in _FLAT else "prefix" if name in _PREFIX else f"a {name}"
    if len(inspect.signature(processor.__call__).parameters) > 2:
        return f"a {name}, which takes more than ids and scores"
    if isinstance(processor, types.FunctionType):
        return _try_function(processor, ids, scores)
    kind = type(processor)
    has_slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    is_python = isinstance(inspect.getattr_static(kind, "__call__"), types.FunctionType)
    if has_slots or not is_python:  # bound methods, partials, compiled objects
        return f"a {name}, which may remember earlier calls"
    return _try(processor, ids, scores)


def _try_function(function: types.FunctionType, ids: Tensor, scores: Tensor) -> Kind | str:
    """Two equal calls of a function whose closure and defaults are plain and stay the same."""
    kept = [cell.cell_contents for cell in function.__closure__ or ()]
    kept += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if vars(function) or not all(isinstance(item, (*_PLAIN, Tensor)) for item in kept):
        return f"a function ({function.__name__}), whose closure may remember earlier calls"
    before = copy.deepcopy(kept)
    try:
        answers = [function(ids.clone(), scores.clone()) for _ in range(2)]
    except Exception as error:  # as in `_try`
        return f"a function ({function.__name__}), which raised {type(error).__name__} when tried"
    after = [cell.cell_contents for cell in function.__closure__ or ()]
    after += kept[len(after) :]  # the same objects, which a call may have changed
    if _is_same(*answers) and _is_same(before, after):
        return "prefix"
    for cell, old in zip(function.__closure__ or (), before):
        cell.cell_contents = old
    return f"a function ({function.__name__}), which answers the same question differently"


def _try(processor: Any, ids: Tensor, scores: Tensor) -> Kind | str:
    """Two trial calls on a copy, the second with a longer prefix."""
    name = type(processor).__name__
    tools: dict[int, Any] = {}  # used by the copy as they are
    for attribute, value in vars(processor).items():
        for leaf in _leaves(value):
            if _is_tool(leaf):
                tools[id(leaf)] = leaf
            elif not isinstance(leaf, (*_PLAIN, Tensor)):
                kept = type(leaf).__name__
                return f"a {name}, whose {attribute} ({kept}) may remember earlier calls"
    trial = copy.copy(processor)
    object.__setattr__(trial, "__dict__", copy.deepcopy(vars(processor), dict(tools)))
    before = copy.deepcopy(vars(trial), dict(tools))
    try:
        for prefix in (ids, torch.cat([ids, ids[:, -1:]], 1)):
            trial(prefix.clone(), scores.clone())
    except Exception as error:  # the reason says so; transformers' own loop raises it if it is real
        return f"a {name}, which raised {type(error).__name__} when tried"
    return "prefix" if _is_same(before, vars(trial)) else f"a {name}, which remembers earlier calls"


def _leaves(value: Any) -> Iterator[Any]:
    """What plain containers hold, however deep."""
    if isinstance(value, dict):
        value = (item for pair in value.items() for item in pair)
    elif not isinstance(value, _BOXES):
        yield value
        return
    for item in value:
        yield from _leaves(item)


def _is_tool(value: Any) -> bool:
    """Something that is called: a function, a model, a tokenizer."""
    from transformers import PreTrainedTokenizerBase

    is_function = isinstance(value, types.FunctionType) and not value.__closure__
    home = getattr(value, "__self__", value)  # a built-in function's is its module
    is_function |= inspect.isbuiltin(value) and isinstance(home, (types.ModuleType, type(None)))
    return is_function or isinstance(value, (nn.Module, PreTrainedTokenizerBase))


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        same_keys = list(one) == list(other)
        return same_keys and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(_is_same(a, b) for a, b in zip(one, other))
    return bool(one == other)
