"""Errors of the library: children of `MMAccelError` and of the built-in one that a caller would
catch. A message says on one line what was expected and received, and how to repair it.
"""

from __future__ import annotations

import re

_LONG_TEXT = re.compile(r"""(?<!\w)(?:'((?:[^'\\]|\\.){301,})'|"((?:[^"\\]|\\.){301,})")""")
_MAX_TEXT = 300  # characters of a quoted value in a message
_MAX_MESSAGE = 8_000  # characters: twenty wrong rows of a file, each with its reason


class MMAccelError(Exception):
    """Root of all errors raised on purpose by mmaccel; long values in a message are cut."""

    def __init__(self, message: str = "", *more: object) -> None:
        super().__init__(_shorten(message), *more)


def _shorten(message: str) -> str:
    if len(message) <= _MAX_TEXT:
        return message
    message = _LONG_TEXT.sub(lambda found: f"{found[0][:_MAX_TEXT]}...{found[0][-1]}", message)
    if len(message) <= _MAX_MESSAGE:
        return message
    half = _MAX_MESSAGE // 2
    return f"{message[:half]} ... {message[-half:]}"


def describe(error: BaseException) -> str:
    return f"{type(error).__name__} ({' '.join(str(error).split())[:80]})"


class ShapeError(MMAccelError, ValueError):
    """A tensor has the wrong shape, dtype or device."""


class OptionError(MMAccelError, ValueError):
    """An option or argument lies outside its domain."""


class UnsupportedModelError(MMAccelError, TypeError):
    """The object given is no model that the requested policy can drive."""


class MissingBackendError(MMAccelError, ImportError):
    """An optional package or device that the call needs is missing."""


class AttachError(MMAccelError, RuntimeError):
    """A policy cannot be attached to, or detached from, this object."""


class BusyError(MMAccelError, RuntimeError):
    """An object that serves one call at a time was called during another call."""


class NumericsError(MMAccelError, ArithmeticError):
    """The model returned NaN, its codec NaN or infinity, or a filter left no token to choose from.

    `rows` are those of the prompt concerned, if known; the others may be decoded again.
    """

    def __init__(self, message: str = "", rows: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rows = rows
