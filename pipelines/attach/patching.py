"""Injection: replaces methods of ONE object, and restores them.

The object gets a new class, a child of its own class with the same name, in which the named methods
are replaced. Its own class, other objects of that class and the object's attributes never change,
so that restoring the class leaves no trace. The idea of exchanging an object's class is that of
D. Bolya and J. Hoffman, "Token Merging for Fast Stable Diffusion", 2023 (arXiv 2303.17604), whose
released code does it to transformer blocks.

Departures: the new class belongs to one object; copies, pickles and saved files of the object are
of its own class.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Mapping
from typing import Any

from mmaccel.errors import AttachError

_MARK = "_mmaccel_base"


class Injection:
    """Replaced methods of some objects, restored in reverse order.

    Usage: `add` once per object, `remove` at the end.
    """

    def __init__(self) -> None:
        self._objects: list[Any] = []

    def add(
        self, target: Any, methods: Mapping[str, Callable[..., Any]], *, new: bool = False
    ) -> None:
        """Replace methods of one object.

        Args:
            target: the object.
            methods: name to a function of (object, *args, **kwargs). It takes over the original's
                name and signature; the original itself is `original(object, name)`.
            new: the methods keep their own names and signatures, and the object may lack them.

        Raises:
            AttachError: the object has an injection already, lacks a method and `new` is False, or
                its class cannot be exchanged.
        """
        base = type(target)
        if is_injected(target):
            raise AttachError(
                f"attach: expected a {base.__name__} without a policy, received one that has one; "
                "detach it first"
            )
        lacking = [name for name in methods if not callable(getattr(base, name, None))]
        if lacking and not new:
            raise AttachError(
                f"attach: expected an object with {', '.join(methods)}, received a {base.__name__} "
                f"without {', '.join(lacking)}; attach to the model that generates"
            )
        content: dict[str, Any] = {
            name: method if new else functools.wraps(getattr(base, name))(method)
            for name, method in methods.items()
        }
        content |= {
            _MARK: base,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__reduce_ex__": _reduce_to_base,
        }
        metaclass: Any = type(base)
        try:
            target.__class__ = metaclass(base.__name__, (base,), content)
        except TypeError as error:
            raise AttachError(
                "attach: expected an object whose class can be exchanged, received a "
                f"{base.__name__}; attach to an ordinary Python object"
            ) from error
        self._objects.append(target)

    @property
    def is_active(self) -> bool:
        """Whether an object is injected."""
        return bool(self._objects)

    def remove(self) -> None:
        """Restore the class of every object, the last one first. A second call does nothing.

        Raises:
            AttachError: an object's class was exchanged by other code since; that object stays as
                it is, and the call may be repeated.
        """
        while self._objects:
            target = self._objects[-1]
            if _MARK not in vars(type(target)):
                raise AttachError(
                    f"detach: expected the {type(target).__name__} as it was attached, received "
                    "one whose class was exchanged meanwhile; undo the later change first"
                )
            target.__class__ = vars(type(target))[_MARK]
            self._objects.pop()


def is_injected(target: Any) -> bool:
    """Whether the object has an injection."""
    return hasattr(type(target), _MARK)


def original(target: Any, name: str) -> Callable[..., Any]:
    """The object's own method under an injection; without an injection, its current method."""
    base = getattr(type(target), _MARK, type(target))
    return getattr(base, name).__get__(target)


def _reduce_to_base(self: Any, protocol: Any) -> Any:
    """Copy and pickle as the plain object."""
    injected = type(self)
    base = getattr(injected, _MARK)
    reduced = base.__reduce_ex__(self, protocol)
    if not isinstance(reduced, tuple):
        return reduced
    function, arguments, *rest = reduced
    plain = tuple(base if argument is injected else argument for argument in arguments)
    if function is copyreg.__newobj__:  # type: ignore[attr-defined]
        function = base.__new__  # equivalent; pickle checks the class given to `__newobj__`
    return (base if function is injected else function, plain, *rest)


def as_function(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method of another object as a plain function, which a class can hold."""
    return lambda *args, **options: method(*args, **options)
