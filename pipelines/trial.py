"""A callable of the user's, tried on a copy: whatever it remembers is neither used nor changed.

The copy goes as deep as Python lets us look: closures, defaults and attributes of functions, the
global variables that a function reads (and those of functions beside it that it calls), bound
objects, attributes of objects of plain Python classes, containers. Functions of libraries, modules,
models and tokenizers are taken as they are, and those of the user's own are watched
(`mmaccel.pipelines.watch`). What neither is copied nor taken is unknown, and may remember.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.pipelines.tried import Tried
from mmaccel.pipelines.watch import LIBRARIES, PLAIN, names_of

_BOXES = (list, tuple, set, frozenset, deque)


class Unknown(TypeError):
    """Something that cannot be looked into; the text is its type's name."""


class Trial(Tried):
    """A copy to be called.

    Args:
        original: a function, a bound method, a partial or an object with `__call__`.

    Raises:
        Unknown: see the module.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        super().__init__()
        self._copies: dict[int, Any] = {}
        self._originals: list[Any] = []  # so that no id is used twice
        self._looks: list[Callable[[], list[Any]]] = []
        self.copy = self._copied(original)
        self._before = [look() for look in self._looks]

    def _differs(self) -> bool:
        return not all(_is_same(old, look()) for old, look in zip(self._before, self._looks))

    def _copied(self, value: Any) -> Any:
        if isinstance(value, PLAIN):
            return value
        if type(value) not in (dict, *_BOXES) and _is_tool(value):
            self._watch(value)
            return value
        if id(value) not in self._copies:
            self._originals.append(value)
            self._copies[id(value)] = self._made(value)
        return self._copies[id(value)]

    def _made(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self._copied(value.__func__), self._copied(value.__self__))
        if type(value) is partial:
            given = self._copied(value.args), self._copied(value.keywords)
            return partial(self._copied(value.func), *given[0], **given[1])
        if isinstance(value, Tensor):
            made = value.detach().clone()
            self._looks.append(lambda: [made.clone()])
            return made
        if type(value) in (dict, *_BOXES):
            return self._box(value)
        return self._object(value)

    def _box(self, value: Any) -> Any:
        if type(value) in (tuple, frozenset):
            return type(value)(map(self._copied, value))
        made = self._copies[id(value)] = type(value)()
        if isinstance(made, dict):
            made.update((self._copied(key), self._copied(item)) for key, item in value.items())
            self._looks.append(lambda: [*made, *made.values()])
        else:
            (made.update if isinstance(made, set) else made.extend)(map(self._copied, value))
            self._looks.append(lambda: list(made))
        return made

    def _object(self, value: Any) -> Any:
        kind = type(value)
        bases = [base for base in kind.__mro__ if base is not object]
        is_python = all(base.__flags__ & 1 << 9 and "__slots__" not in vars(base) for base in bases)
        if not is_python or kind.__new__ is not object.__new__ or any(map(_is_shared, bases)):
            raise Unknown(kind.__name__)
        self._watch(kind)
        made = self._copies[id(value)] = object.__new__(kind)
        made.__dict__.update({name: self._copied(item) for name, item in vars(value).items()})
        self._looks.append(lambda: [*vars(made), *vars(made).values()])
        return made

    def _function(self, value: types.FunctionType) -> Any:
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        spaces = self._copies.setdefault(id(value.__globals__), dict(value.__globals__))
        made = types.FunctionType(value.__code__, spaces, value.__name__, None, cells)
        self._copies[id(value)] = made
        for cell, old in zip(cells, value.__closure__ or ()):
            try:
                cell.cell_contents = self._copied(old.cell_contents)
            except ValueError:  # an empty one
                continue
        names = [name for name in names_of(value.__code__) if name in value.__globals__]
        for name in names:
            spaces[name] = self._copied(value.__globals__[name])
        made.__defaults__ = self._copied(value.__defaults__)
        made.__kwdefaults__ = self._copied(value.__kwdefaults__)
        made.__dict__.update(self._copied(vars(value)))
        self._looks += [
            lambda: [getattr(cell, "cell_contents", None) for cell in cells],
            lambda: [spaces.get(name) for name in names],
            lambda: [*vars(made), *vars(made).values()],
        ]
        return made


def _is_tool(value: Any) -> bool:
    """What is used and holds nothing of the user's: a module, a class, a model, a tokenizer."""
    from transformers import PreTrainedTokenizerBase

    if isinstance(value, (types.ModuleType, type, nn.Module, PreTrainedTokenizerBase)):
        return True
    if type(value).__module__.partition(".")[0] == "tokenizers":
        return True
    if isinstance(value, types.FunctionType):
        home = (value.__module__ or "").partition(".")[0]
        return home in LIBRARIES and not value.__closure__
    owner = getattr(value, "__self__", None)  # a built-in function's is its module
    is_builtin = isinstance(value, types.BuiltinFunctionType)
    return is_builtin and isinstance(owner, (types.ModuleType, type(None)))


def _is_shared(kind: type) -> bool:
    """Whether a class holds what all its objects may write to."""
    held = [item for name, item in vars(kind).items() if not name.startswith("__")]
    return any(isinstance(item, (list, dict, set, deque, Tensor)) for item in held)


def _is_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(_is_alike, one, other))


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or torch.equal(one, other)
    is_plain = isinstance(one, PLAIN) and type(one) is type(other)
    return one is other or (is_plain and bool(one == other))
