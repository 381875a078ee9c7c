"""A processor of the user's own class, tried on a copy of what it holds."""

from __future__ import annotations

import copy
import inspect
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.pipelines.trial import Unknown
from mmaccel.pipelines.tried import Tried
from mmaccel.pipelines.watch import PLAIN

_BOXES = (list, tuple, set, frozenset, deque)


class ObjectTrial(Tried):
    """A copy to be called.

    Args:
        original: an object of a class of Python's making; attributes are tensors, plain values,
            functions, networks, tokenizers, and containers of these.

    Raises:
        Unknown: another attribute.
    """

    def __init__(self, original: Any) -> None:
        super().__init__()
        self._watch(type(original))
        self._tools: dict[int, Any] = {}  # used by the copy as they are
        for attribute, value in vars(original).items():
            for leaf in _leaves(value):
                if _is_tool(leaf):
                    self._tools[id(leaf)] = leaf
                    self._watch(leaf)
                elif not isinstance(leaf, (*PLAIN, type, Tensor)):
                    raise Unknown(f"{attribute} ({type(leaf).__name__})")
        self.copy = copy.copy(original)
        object.__setattr__(self.copy, "__dict__", self._copied(vars(original)))
        self._before = self._copied(vars(self.copy))

    def _copied(self, held: dict[str, Any]) -> dict[str, Any]:
        return copy.deepcopy(held, dict(self._tools))

    def _differs(self) -> bool:
        return not is_same(self._before, vars(self.copy))


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


def is_same(one: Any, other: Any) -> bool:
    """Whether two answers, or what two objects hold, are equal and of the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        same_keys = list(one) == list(other)
        return same_keys and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(is_same(a, b) for a, b in zip(one, other))
    return bool(one == other)
