"""A device that is not the processor, on a machine that has no other.

Inside `far()` a tensor that was asked for on `DEVICE`, and whatever is computed of it, is a `Far`:
its values lie on the processor, but it says that it is elsewhere, and an operation that would meet
tensors of both sides is refused as an accelerator refuses it. Of what an accelerator allows, a
number without dimensions, indices on the processor and copies across are let through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("xpu", 0)
_ACROSS = ("aten::copy_", "aten::_to_copy", "aten::_copy_from")
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index")
_BELOW = ("one_hot", "new_tensor")  # which make tensors below the dispatcher
_HOST = ("numpy", "__array__")


class Far(Tensor):
    """A tensor elsewhere; `near` holds its values."""

    near: Tensor
    n_operations = 0  # so far, in all
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, near: Tensor) -> Far:
        made: Far = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, near.size(), strides=near.stride(), storage_offset=near.storage_offset(),
            dtype=near.dtype, layout=near.layout, device=near.device,
        )  # fmt: skip
        made.near = near
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it says that it is."""
        return DEVICE

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Far({self.near!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Far.n_operations += 1
        given, _ = tree_flatten((args, kwargs or {}))
        _check(func._schema.name, [value for value in given if isinstance(value, Tensor)])
        owners = {id(value.near): value for value in given if isinstance(value, Far)}
        with torch._C._DisableTorchDispatch():
            made = func(*tree_map(_near, args), **tree_map(_near, kwargs or {}))
        return tree_map(partial(_owned, owners), made)


def _check(name: str, tensors: list[Tensor]) -> None:
    """Refuse tensors of both sides together."""
    if name in _ACROSS:
        return
    if name in _INDEXING and isinstance(tensors[0], Far):
        tensors = [t for t in tensors[1:] if t.dtype not in (torch.int64, torch.bool)]
    near = [t for t in tensors if not isinstance(t, Far) and t.dim()]
    if near and len(near) < len(tensors):
        raise RuntimeError(
            f"{name}: expected all tensors on one device, received {tuple(near[0].shape)} of "
            f"{near[0].dtype} on the processor among others on {DEVICE}"
        )


def _near(value: Any) -> Any:
    return value.near if isinstance(value, Far) else value


def _owned(owners: dict[int, Far], value: Any) -> Any:
    """What an operation in place returns is the tensor it was given."""
    return owners[id(value)] if id(value) in owners else _far(value)


def _far(value: Any) -> Any:
    return Far(value) if isinstance(value, Tensor) and not isinstance(value, Far) else value


class _Mode(TorchFunctionMode):
    """Makes tensors where they are asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("to", "cpu") and isinstance(args[0], Tensor):
            return _move(func, args, kwargs)
        if isinstance(args[0] if args else None, Far):
            if name in ("tolist", "data_ptr"):
                return func(args[0].near)
            if name in _BELOW:
                return Far(func(args[0].near, *args[1:], **kwargs))
            if name in _HOST:
                raise TypeError(f"{name}: expected a tensor of the processor, received {DEVICE}")
        asked = kwargs.get("device")
        if asked is None:
            return func(*args, **kwargs)
        if torch.device(asked).type != DEVICE.type:
            return tree_map(_near, func(*args, **kwargs))
        kwargs["device"] = torch.device("cpu")
        return tree_map(_far, func(*args, **kwargs))


def _move(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """`Tensor.to` and `Tensor.cpu`."""
    own, rest = args[0], args[1:]
    if func.__name__ == "cpu":
        return _near(own)
    other = rest[0] if rest else kwargs.get("other")
    if isinstance(other, Tensor):
        where: torch.device | None = other.device
        values = _near(own).to(other.dtype)
    else:
        copy = kwargs.pop("copy", False)
        where, dtype, _, layout = torch._C._nn._parse_to(*rest, **kwargs)
        values = _near(own).to(dtype=dtype or own.dtype, copy=copy, memory_format=layout)
    is_far = isinstance(own, Far) if where is None else where.type == DEVICE.type
    if values is _near(own) and is_far == isinstance(own, Far):
        return own  # type: ignore[no-any-return]
    return Far(values if values is not own else own.clone()) if is_far else values.clone()


@contextmanager
def far() -> Iterator[torch.device]:
    """While it lasts, there is a device that is not the processor."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with _Mode():
            yield DEVICE
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def same(make: Callable[[Any], Tensor]) -> bool:
    """Whether both devices make the same."""
    wanted, before = make(torch.device("cpu")), Far.n_operations
    assert not isinstance(wanted, Far)
    with far() as device:
        made = make(device)
    assert Far.n_operations > before + 500  # it did run there
    return torch.equal(made.near if isinstance(made, Far) else made, wanted)
