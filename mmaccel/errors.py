"""Errors of the library.

Every error is a child of `MMAccelError` and also of the built-in a caller would catch. A message
says what was expected, what was received and what to do about it, on one line.
"""

from __future__ import annotations


class MMAccelError(Exception):
    """Root of all errors raised on purpose by mmaccel."""


class ShapeError(MMAccelError, ValueError):
    """A tensor has the wrong shape, dtype or device."""


class OptionError(MMAccelError, ValueError):
    """An option or argument lies outside its domain."""


class UnsupportedModelError(MMAccelError, TypeError):
    """The object given is no model that the requested policy can drive."""


class MissingBackendError(MMAccelError, ImportError):
    """An optional package or device that the call needs is not there."""


class AttachError(MMAccelError, RuntimeError):
    """A policy cannot be attached to, or detached from, this object."""


class BusyError(MMAccelError, RuntimeError):
    """An object that makes one thing at a time was called while it still made another."""


class NumericsError(MMAccelError, ArithmeticError):
    """The model returned NaN, or a filter left no token to choose from.

    Args:
        message: as of any error.
        rows: which rows of the prompt it befell, where that is known; others may be tried again.
    """

    def __init__(self, message: str = "", rows: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rows = rows
