"""Methods of other packages, by entry points, and of the user, by `module:Name`.

A package is installed because somebody wants it: names of its entry points are taken everywhere.
A `module:Name` is code that runs only where a person asked for it. Out of a prompt file, a request
to the server, a workflow or a checkpoint it is a plain `str`, which is never imported; the options
of the command line make a `TypedName` of what was typed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from mmaccel.checks import show, suggest
from mmaccel.errors import OptionError

ONLY_TYPED = (
    "a module:Name is taken from the command line alone, where it is typed; in Python give an "
    "instance"
)
_ABSENT = object()
_CHILD = "a frozen dataclass that is a child of"
_WANTED = {  # slot -> name of the option, what is expected
    "policies": (
        "policy",
        "a frozen dataclass with exactness and sample, such as a child of WindowPolicy or "
        "SelectorPolicy",
    ),
    "reducers": ("visual_tokens", f"{_CHILD} TokenReducer"),
    "tree": ("tree", f"{_CHILD} TreeShape"),
    "siblings": ("siblings", f"{_CHILD} SiblingRule"),
    "kv_cache": ("kv_cache", f"{_CHILD} CacheMethod or CacheQuantizer"),
    "attention": ("attention", f"{_CHILD} AttentionMethod"),
    "drafts": ("drafts", f"{_CHILD} DraftSource"),
}


class TypedName(str):
    """A name that was typed on the command line: a short name, or `module:Name`."""

    __slots__ = ()


@cache
def installed(slot: str) -> dict[str, str]:
    """What other packages bring, looked up once: name (a `model_type` of families) ->
    "module:Name".
    """
    from importlib.metadata import entry_points  # takes longer than `import mmaccel` does

    return {found.name: found.value for found in entry_points(group=f"mmaccel.{slot}")}


def is_module_name(name: Any) -> bool:
    return isinstance(name, str) and ":" in name


def find_named(slot: str, name: str, base: str | None) -> str | None:
    """The "module:Name" of a method that is not ours, a child of the "module:Class" `base` or with
    the members of a policy, loaded and checked, or an OptionError; None for a short name that no
    package brings, and for a `module:Name` that is no `TypedName`.
    """
    target = installed(slot).get(name)
    if target is None and isinstance(name, TypedName) and is_module_name(name):
        target = str(name)
    if target is None:
        return None
    option, wanted = _WANTED[slot]
    method = import_named(target, option)
    if base is None:
        is_method = hasattr(method, "exactness") and callable(getattr(method, "sample", None))
    else:
        is_method = isinstance(method, type) and issubclass(method, import_named(base, option))
    if not (is_method and _is_frozen(method)):
        raise OptionError(
            f"{option}: expected {wanted}, received {show(target)}, {_describe(method)}; see "
            "docs/extending.md"
        )
    return target


def _is_frozen(found: Any) -> bool:
    own: Any = found
    return isinstance(found, type) and is_dataclass(found) and bool(own.__dataclass_params__.frozen)


def _describe(found: Any) -> str:
    if not isinstance(found, type):
        return f"a {type(found).__name__}"
    parents = [parent.__name__ for parent in found.__bases__ if parent is not object]
    child = f", a child of {', '.join(parents)}" if parents else ""
    if not is_dataclass(found):
        return f"a class that is no dataclass{child}"
    kind = "a frozen dataclass" if _is_frozen(found) else "a dataclass that is not frozen"
    return f"{kind}{child}"


def import_named(name: str, option: str, wanted: str = "module:Name") -> Any:
    """What a `module:Name` names, or an OptionError. The module is found as Python finds it, and
    last in the folder in which the program runs.
    """
    given = f"{option}: expected {wanted}, received {show(name)}"
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise OptionError(f"{given}; write for example mine:MyOwn, of a file mine.py")
    try:
        with _working_folder_last():
            loaded = import_module(module)
    except (Exception, SystemExit) as error:  # the module is the user's own code
        raise OptionError(f"{given} ({_why(error, module)})") from error
    value = getattr(loaded, attribute, _ABSENT)
    if value is _ABSENT:
        public = [known for known in vars(loaded) if not known.startswith("_")]
        remedy = suggest(attribute, public, "check the spelling")
        raise OptionError(f"{given} ({_file_of(loaded)} has no {show(attribute)}); {remedy}")
    return value


@contextmanager
def _working_folder_last() -> Iterator[None]:
    """Python finds modules in the working folder too, after all others."""
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it was removed
        here = ""
    is_new = bool(here) and here not in sys.path
    if is_new:
        sys.path.append(here)
    try:
        yield
    finally:
        if is_new and here in sys.path:  # the module may have changed it
            sys.path.remove(here)


def _why(error: BaseException, module: str) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{module}.".startswith(f"{missing}."):
        return "no module of that name here or installed; go to its folder, or install it"
    return f"importing it raises {reason(error)}; run it with python -m to see where"


def reason(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())[:100]
    except Exception:  # its __str__ is the user's code too
        text = "a message that cannot be read"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _file_of(module: ModuleType) -> str:
    return str(getattr(module, "__file__", None) or module.__name__)
