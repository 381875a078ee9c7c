"""Whether a user's processor remembers earlier calls, found out by calls of a copy.

Each answers "prefix" if nothing was remembered, or the reason why it is refused. What is kept where
`mmaccel.pipelines.trial` does not look is found only if equal calls answer differently.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.pipelines.trial import PLAIN, Trial, Unknown

_BOXES = (list, tuple, set, frozenset, deque)


def try_function(function: types.FunctionType, ids: Tensor, scores: Tensor) -> str:
    """Two equal calls of a copy of a function whose closure and defaults are plain."""
    kept = [cell.cell_contents for cell in function.__closure__ or ()]
    kept += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    name = f"a function ({function.__name__})"
    if vars(function) or not all(isinstance(item, (*PLAIN, type, Tensor)) for item in kept):
        return f"{name}, whose closure may remember earlier calls"
    try:
        trial = Trial(function)
    except Unknown as error:
        return f"{name}, whose {error} may remember earlier calls"
    try:
        answers = [trial.copy(ids.clone(), scores.clone()) for _ in range(2)]
    except Exception as error:  # as in `try_object`
        return f"{name}, which raised {type(error).__name__} when tried"
    if _is_same(*answers) and not trial.has_changed:
        return "prefix"
    return f"{name}, which answers the same question differently"


def try_allowed(function: Any, ids: Tensor) -> str:
    """Calls of a copy of a `prefix_allowed_tokens_fn`: two equal ones, and one with more tokens.

    That it raises counts for nothing: it may know what cannot stand there. What is real is raised
    where it is real.
    """
    name = f"a prefix_allowed_tokens_fn ({getattr(function, '__name__', type(function).__name__)})"
    try:
        trial = Trial(function)
    except Unknown as error:
        return f"{name}, whose {error} may remember earlier calls"
    answers: list[Any] = []
    for prefix in (ids[0], ids[0], torch.cat([ids[0], ids[0, -1:]])):
        try:
            answers.append(trial.copy(0, prefix.clone()))
        except Exception as error:
            answers.append(type(error))
    if trial.has_changed:
        return f"{name}, which remembers earlier calls"
    if not _is_same(*answers[:2]):
        return f"{name}, which answers the same question differently"
    return "prefix"


def try_object(processor: Any, ids: Tensor, scores: Tensor) -> str:
    """Two trial calls on a copy, the second with a longer prefix."""
    name = type(processor).__name__
    tools: dict[int, Any] = {}  # used by the copy as they are
    for attribute, value in vars(processor).items():
        for leaf in _leaves(value):
            if _is_tool(leaf):
                tools[id(leaf)] = leaf
            elif not isinstance(leaf, (*PLAIN, type, Tensor)):
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
