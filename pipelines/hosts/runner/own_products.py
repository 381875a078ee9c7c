"""Products in oneDNN's order for a model's own forward, of canvases and of windows that the fused
decoder does not serve: its `nn.Linear` layers multiply by `PackedLinear`, all else runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from mmaccel.pipelines.hosts.runner.onednn import Products
from mmaccel.pipelines.hosts.runner.packed_linear import PackedLinear
from mmaccel.samplers.run_lock import in_turn


class OwnProducts:
    """Linear layers of a model on a CPU."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        self.linears = linears
        self.dtype = linears[0].weight.dtype
        self.products = Products([PackedLinear([linear]) for linear in linears], {})
        self._forwards = dict(zip(linears, map(_make_forward, self.products.linears)))

    @contextmanager
    def using(self, n_rows: int) -> Iterator[None]:
        """Inside the block products of so many rows take oneDNN's order where that is faster."""
        if not self.products.prepare(n_rows):
            yield
            return
        try:
            for linear, forward in self._forwards.items():
                vars(linear)["forward"] = forward
            yield
        finally:
            for linear in self._forwards:
                vars(linear).pop("forward", None)


def _find_linears(model: Any) -> list[nn.Linear]:
    """Plain layers with weights of the model's dtype on a CPU; none of a compiled model."""
    linears = []
    for module in model.modules():
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            return []
        if type(module) is not nn.Linear or "forward" in vars(module):
            continue
        weight = module.weight
        is_known = type(weight) is nn.Parameter and not weight.is_inference()  # these: no versions
        if is_known and weight.device.type == "cpu" and weight.dtype == model.dtype:
            linears.append(module)
    return linears


def _make_forward(product: PackedLinear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    return forward


def own_products(own: OwnProducts | None, entries: Tensor) -> AbstractContextManager[None]:
    return nullcontext() if own is None else own.using(entries.shape[0] * entries.shape[1])


_opened: WeakKeyDictionary[Any, OwnProducts] = WeakKeyDictionary()


@in_turn
def open_own_products(model: Any) -> OwnProducts | None:
    """Those of a model with weights worth a copy, else None; opened again if layers changed."""
    linears = _find_linears(model)
    own = _opened.get(model)
    if own is None or own.linears != linears or own.dtype != model.dtype:
        close_own_products(model)
        if not linears:
            return None
        own = OwnProducts(linears)
    own.products.reorder()
    if not own.products.reordered_bytes:
        return None
    _opened[model] = own
    return own


def find_own_products(model: Any) -> OwnProducts | None:
    return _opened.get(model)


@in_turn
def close_own_products(model: Any) -> None:
    own = _opened.pop(model, None)
    if own is not None:
        own.products.unpack()
