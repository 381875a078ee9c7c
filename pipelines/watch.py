"""What a callable of the user's may write to and cannot be copied: noted, compared, put back.

Plain values and containers are looked at in the namespaces of the user's own classes, modules and
networks, and in the global variables that methods name. Not looked into: containers inside
containers, files, the environment, and what a library keeps.
"""

from __future__ import annotations

import re
import sys
import types
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import nn

_NUMBERS = (bool, int, float, complex, torch.dtype)
PLAIN = (*_NUMBERS, str, bytes, type(None), range, re.Pattern, torch.device)
LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "transformers", "tokenizers", "mmaccel"}
_BOXES = (dict, list, set, deque)


class Watch:
    """One namespace.

    Args:
        space: name to value, as it is now and as it will be.
        put: sets a name.
        drop: deletes one.
        names: those to look at; None looks at all but a language's own.
    """

    def __init__(
        self,
        space: Mapping[str, Any],
        put: Callable[[str, Any], Any],
        drop: Callable[[str], Any],
        names: Container[str] | None = None,
    ) -> None:
        self._space, self._put, self._drop, self._names = space, put, drop, names
        self._before = self._note()

    @property
    def has_changed(self) -> bool:
        """Whether anything is not as it was."""
        now = self._note()
        return now.keys() != self._before.keys() or any(
            not _is_same(old, now[name]) for name, old in self._before.items()
        )

    def restore(self) -> None:
        """Everything as it was."""
        now = self._note()
        for name in now.keys() - self._before.keys():
            self._drop(name)
        for name, (value, content) in self._before.items():
            if name in now and _is_same((value, content), now[name]):
                continue
            if content is not None:
                value.clear()
                (value.update if isinstance(value, (dict, set)) else value.extend)(content)
            self._put(name, value)

    def _note(self) -> dict[str, tuple[Any, Any]]:
        """By name the value, and what it holds if it is a container."""
        found: dict[str, tuple[Any, Any]] = {}
        for name, value in list(self._space.items()):
            if name.startswith("__") if self._names is None else name not in self._names:
                continue
            if isinstance(value, PLAIN):
                found[name] = value, None
            elif type(value) in _BOXES:
                found[name] = value, value.copy()
        return found


def watch(owner: Any) -> Iterator[Watch]:
    """Watches over what is used as it is: a class, a module or a network; none of a library's."""
    if isinstance(owner, nn.Module):
        for part in owner.modules():
            if not is_of_library(type(part).__module__):
                yield from _over(part)
    elif isinstance(owner, type):
        for base in owner.__mro__:
            if not is_of_library(base.__module__):
                yield from _over(base)
                yield from _globals(base)
    elif isinstance(owner, types.ModuleType) and not is_of_library(owner.__name__):
        yield from _over(owner)


def is_of_library(name: str | None) -> bool:
    """Whether a module is Python's, or installed: nothing of the user's own program."""
    module = sys.modules.get(name or "")
    file = getattr(module, "__file__", None) or ""
    is_known = (name or "").partition(".")[0] in LIBRARIES
    return is_known or "site-packages" in file or "dist-packages" in file


def names_of(code: types.CodeType) -> Iterator[str]:
    """Global names that code reads or writes, that of functions inside it too."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names_of(inner)


def _over(owner: Any) -> Iterator[Watch]:
    def put(name: str, value: Any) -> None:
        setattr(owner, name, value)

    yield Watch(vars(owner), put, lambda name: delattr(owner, name))


def _globals(kind: type) -> Iterator[Watch]:
    """Of a class's methods."""
    for held in vars(kind).values():
        function = getattr(held, "__func__", held)
        if isinstance(function, types.FunctionType):
            space, names = function.__globals__, set(names_of(function.__code__))
            yield Watch(space, space.__setitem__, space.__delitem__, names)


def _is_same(old: tuple[Any, Any], new: tuple[Any, Any]) -> bool:
    (value, content), (now, held) = old, new
    if content is None or held is None:
        return type(value) is type(now) and bool(value == now)
    return value is now and _is_alike(content, held)


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        same_keys = list(one) == list(other)
        return same_keys and _is_alike(list(one.values()), list(other.values()))
    if isinstance(one, set):
        return bool(one == other)
    return len(one) == len(other) and all(
        a is b or (isinstance(a, PLAIN) and type(a) is type(b) and a == b)
        for a, b in zip(one, other)
    )
