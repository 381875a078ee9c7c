"""Injection: replaces methods of ONE object, and restores them.

The object gets a new class, a child of its own class with the same name, in which the methods are
replaced; its own class never changes. The idea is that of D. Bolya and J. Hoffman, "Token Merging
for Fast Stable Diffusion", 2023 (arXiv 2303.17604), whose released code does it to transformer
blocks.

The new class is made once for each class and set of methods, and kept: code that torch.compile made
for an attached object holds for the next attach too. So it knows no policy: its methods look up
what replaces them in the object.

While a replaced method runs, `detach`, and what moves a module's weights (`to`, `half`, `cuda`),
wait for calls of other threads, and are refused inside a call.

Departures: copies, pickles and saved files of the object are of its own class.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from threading import Condition, RLock, get_ident
from typing import Any

from mmaccel.errors import AttachError, BusyError
from mmaccel.pipelines.hosts.original_methods import BASE, original, plain_class

_PATCH = "_mmaccel_patch"  # attribute of an injected object: its `_Patch`
_MOVE = "_apply"  # method of `torch.nn.Module` by which `to`, `half` and `cuda` change all weights

_CLASSES: dict[tuple[Any, ...], type] = {}  # injected classes by own class and methods


class RunningCalls:
    """The calls of attached objects that have not ended, in all threads. A change of an object
    waits for its calls, and those that begin meanwhile wait for it, but for those inside a running
    call.
    """

    def __init__(self) -> None:
        self._gate = RLock()  # a change holds it
        self._ended = Condition()
        self._running: list[tuple[int, int]] = []  # thread and id of the object

    @contextmanager
    def call(self, target: Any) -> Iterator[None]:
        entry = (get_ident(), id(target))
        with self._behind_changes():
            self._running.append(entry)
        try:
            yield
        finally:
            with self._ended:
                self._running.remove(entry)
                self._ended.notify_all()

    @contextmanager
    def change(self, what: str, target: Any = None) -> Iterator[None]:
        """Inside the block no call of a target runs, or of any; BusyError inside a call."""
        if get_ident() in self._threads(target):
            raise BusyError(
                f"{what}: expected no running call, received it from inside one; end the call "
                f"first (a stopping criterion may return True), then {what}"
            )
        with self._behind_changes():
            with self._ended:
                self._ended.wait_for(lambda: not self._threads(target))
            yield

    def _behind_changes(self) -> AbstractContextManager[Any]:
        """Waits for a change by another thread, unless that may wait for this one."""
        return nullcontext() if get_ident() in self._threads(None) else self._gate

    def _threads(self, target: Any) -> list[int]:
        """Threads with a running call of an object, or of any."""
        return [thread for thread, one in self._running if target is None or one == id(target)]


@dataclass
class _Patch:
    """What an injected object holds: its methods by name, and the injection that put them there."""

    methods: Mapping[str, Callable[..., Any]]
    injection: Injection

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are None: the policy stays with the object it was attached to."""
        return type(None), ()


class Injection:
    """Replaced methods of objects with an `owner` (`find_owner`), restored in reverse order."""

    def __init__(self, owner: Any = None) -> None:
        self._objects: list[Any] = []
        self.owner = owner
        self.calls = RunningCalls()

    def add(self, target: Any, methods: Mapping[str, Callable[..., Any]]) -> None:
        """Replace methods of one object by functions of (object, *args, **kwargs), by name. Each
        takes over the signature of `original(object, name)`.
        """
        base = plain_class(target)
        if is_injected(target):
            raise AttachError(
                f"attach: expected a {base.__name__} without a policy, received one that has one; "
                "detach it first, with mmaccel.detach"
            )
        try:
            target.__class__ = _injected_class(base, methods)
        except TypeError as error:
            raise AttachError(
                "attach: expected an object whose class can be exchanged, received a "
                f"{base.__name__}; attach to an ordinary Python object"
            ) from error
        vars(target)[_PATCH] = _Patch(methods, self)
        self._objects.append(target)

    @property
    def is_active(self) -> bool:
        return bool(self._objects)

    def remove(self) -> None:
        """Restore the class of every object, the last one first; a second call does nothing.
        AttachError where other code exchanged one's class since; it stays, and the call may be
        repeated.
        """
        while self._objects:
            target = self._objects[-1]
            if BASE not in vars(type(target)):
                raise AttachError(
                    f"detach: expected the {type(target).__name__} as it was attached, received "
                    "one whose class was exchanged meanwhile; undo the later change first"
                )
            target.__class__ = vars(type(target))[BASE]
            del vars(target)[_PATCH]
            self._objects.pop()


def _injected_class(base: type, methods: Mapping[str, Callable[..., Any]]) -> type:
    """The class of injected objects of class `base`, the same for the same methods."""
    key = (base, *methods)
    if key not in _CLASSES:
        content: dict[str, Any] = {
            name: _forward(name, getattr(base, name, method)) for name, method in methods.items()
        }
        content |= {
            BASE: base,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__reduce_ex__": _reduce_to_base,
        }
        if hasattr(base, _MOVE):
            content[_MOVE] = _move
        metaclass: Any = type(base)
        _CLASSES[key] = metaclass(base.__name__, (base,), content)
    return _CLASSES[key]


def _forward(name: str, like: Callable[..., Any]) -> Callable[..., Any]:
    """A method with the name and signature of `like` that calls what the object holds instead."""

    def method(self: Any, *args: Any, **options: Any) -> Any:
        patch = _patch_of(self)
        if patch is not None:
            with patch.injection.calls.call(self):
                if _patch_of(self) is patch:  # not detached while the call waited
                    return patch.methods[name](self, *args, **options)
        return original(self, name)(*args, **options)  # also of a copy that knows no policy

    method = functools.wraps(like)(method)
    del method.__wrapped__  # the class outlives what replaces its methods
    method.__signature__ = inspect.signature(like)  # type: ignore[attr-defined]
    return method


def _move(self: Any, *args: Any, **options: Any) -> Any:
    """`Module._apply`, between two calls of the module. accelerate moves its own inside them."""
    patch = _patch_of(self)
    if patch is None or hasattr(self, "_hf_hook"):
        return original(self, _MOVE)(*args, **options)
    with patch.injection.calls.change("move the model", self):
        return original(self, _MOVE)(*args, **options)


def is_injected(target: Any) -> bool:
    return _patch_of(target) is not None


def find_owner(target: Any) -> Any:
    """The `owner` of an object's injection; None without one."""
    patch = _patch_of(target)
    return None if patch is None else patch.injection.owner


def _patch_of(target: Any) -> _Patch | None:
    patch: _Patch | None = getattr(target, "__dict__", {}).get(_PATCH)
    return patch


def _reduce_to_base(self: Any, protocol: Any) -> Any:
    """Copy and pickle as an object of its own class that has the same attributes."""
    base = getattr(type(self), BASE)
    plain = object.__new__(base)
    vars(plain).update({name: value for name, value in vars(self).items() if name != _PATCH})
    reduced = plain.__reduce_ex__(protocol)
    if isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
        reduced = (base.__new__, *reduced[1:])  # pickle compares its class with that of `self`
    return reduced
