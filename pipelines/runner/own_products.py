"""Products in oneDNN's order for a model's own forward, where the fused decoder serves it not.

Inside `OwnProducts.using` the model's `nn.Linear` layers multiply by `PackedLinear`, so that
adapters, experts' routers and unknown layers run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mmaccel.pipelines.runner.fused_structure import find_hook
from mmaccel.pipelines.runner.onednn import Trials
from mmaccel.pipelines.runner.packed_linear import PackedLinear, Products
from mmaccel.samplers.run_lock import in_turn


class OwnProducts:
    """The linear layers of a model on a CPU.

    Attributes:
        products: of them.
    """

    def __init__(self, model: Any) -> None:
        linears = [
            module
            for module in model.modules()
            if type(module) is nn.Linear and _is_plain(module.weight, model.dtype)
        ]
        self.products = Products([PackedLinear([linear]) for linear in linears], Trials())
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


def _is_plain(weight: Tensor, dtype: torch.dtype) -> bool:
    is_known = type(weight) is nn.Parameter and not weight.is_inference()  # which have no versions
    return is_known and weight.device.type == "cpu" and weight.dtype == dtype


def _make_forward(product: PackedLinear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    return forward


_opened: WeakKeyDictionary[Any, OwnProducts] = WeakKeyDictionary()


@in_turn
def open_own_products(model: Any) -> OwnProducts | None:
    """Those of a model whose weights are worth a copy in oneDNN's order; None for others, and where
    something watches or wraps a layer.
    """
    found = _opened.get(model) or OwnProducts(model)
    if not found.products.linears or find_hook(model):
        return None
    found.products.reorder()
    if not found.products.reordered_bytes:
        return None
    _opened[model] = found
    return found


@in_turn
def close_own_products(model: Any) -> None:
    """Drop the copies of a model's weights."""
    found = _opened.pop(model, None)
    if found is not None:
        found.products.unpack()
