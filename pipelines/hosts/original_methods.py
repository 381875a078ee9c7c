"""The methods that an object has apart from an injected policy, a child of its class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BASE = "_mmaccel_base"  # attribute of an injected class: the object's class without the injection


def original(target: Any, name: str) -> Callable[..., Any]:
    """The object's own method under an injection; without an injection, its current method."""
    method: Callable[..., Any] = getattr(plain_class(target), name).__get__(target)
    return method


def plain_class(target: Any) -> type:
    own: type = getattr(type(target), BASE, type(target))
    return own


def has_own(model: Any, name: str) -> bool:
    """Whether a method of one model was replaced by its owner, rather than by `count_passes`."""
    return name in vars(model) and not hasattr(vars(model)[name], "callers")
