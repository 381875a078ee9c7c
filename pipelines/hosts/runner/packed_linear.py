"""Linear layers that read the same input, as one: their weights are views of one packed tensor.

It becomes the storage of the layers' own parameters: there is no second copy, and an optimiser's
step or `load_state_dict` is seen in the product. `unpack` gives each a storage of its own again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from mmaccel.kernels import dispatch
from mmaccel.kernels.row_product import row_product
from mmaccel.pipelines.hosts.runner import onednn
from mmaccel.pipelines.hosts.runner.onednn import MOST_ROWS, Faster, Mark, find_key


class PackedLinear:
    """Plain linear layers that read the same input, all with a bias or none. One alone may keep its
    weight as `[C, N]`, and is never packed.

    The parameters alone hold the packed weight, so that moving or casting the model frees it. While
    they are packed, `state_dict` gives every weight a storage of its own over the same memory.
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        self.linears = tuple(linears)
        self._first = linears[0]._parameters
        self._is_input_major = not isinstance(linears[0], nn.Linear)  # transformers' `Conv1D`
        rows, width = linears[0].weight.shape
        self.shape = (width, rows) if self._is_input_major else (rows, width)  # [N, C], of `weight`
        if len(linears) > 1:
            self.shape = (sum(len(linear.weight) for linear in linears), width)
        self._address: int | None = None  # of the storage of all weights, once it is packed
        self._bias_address: int | None = None
        self._hooks: list[Any] = []
        # whether a row's product has the same bits among any number of rows: by our kernel where it
        # runs; elsewhere a row alone is computed as two, and a weight in oneDNN's order by oneDNN
        self.same_bits = False
        self._reordered: Tensor | None = None  # in oneDNN's order
        self._mark: Mark | None = None  # of what was laid out
        self._faster: Faster = {}
        self._number = next(_numbers)
        _numbered[self._number] = self

    def pack(self) -> None:
        """Make one tensor the storage of all weights, and one that of all biases."""
        if len(self.linears) == 1:
            return
        self._address = _pack([linear.weight for linear in self.linears])
        biases = [linear.bias for linear in self.linears if linear.bias is not None]
        self._bias_address = _pack(biases) if biases else None
        self._hooks = [
            linear.register_state_dict_post_hook(_separate_storages) for linear in self.linears
        ]

    @property
    def weight(self) -> Tensor:
        """`[N, C]`, the rows of all layers; their own weights are views of it."""
        return self._columns().detach().t()

    def __call__(self, x: Tensor, n_rows: int | None = None) -> Tensor:
        """Outputs `[T, N]` of inputs `[T, C]`; `n_rows` is T if compiled for it alone."""
        if torch.compiler.is_compiling():
            if not self._may_be_reordered(n_rows):
                return self.multiply(x)
            out: Tensor = torch.ops.mmaccel.product(x, self._number, self.shape[0])
            return out
        if self.same_bits and self._reordered is None and dispatch.uses_triton(x.device.type):
            return dispatch.run(row_product, x, self.weight, self.bias, same_bits=True)
        if self.same_bits:
            padded = x if len(x) > 1 else torch.cat([x, x])
            is_laid_out = self._reordered is not None
            out = self.multiply_reordered(padded) if is_laid_out else self.multiply(padded)
            return out[: len(x)]
        return self.multiply_reordered(x) if self._is_faster(len(x)) else self.multiply(x)

    def _is_faster(self, n_rows: int) -> bool:
        if self._reordered is None or n_rows > MOST_ROWS:
            return False
        return self.shape in self._faster.get(find_key(n_rows), ())

    @torch.compiler.assume_constant_result
    def _may_be_reordered(self, n_rows: int | None) -> bool:
        return self._is_faster(n_rows) if n_rows else self._reordered is not None

    def multiply_reordered(self, x: Tensor) -> Tensor:
        assert self._reordered is not None
        return onednn.multiply(x, self._reordered, self.bias)

    def multiply(self, x: Tensor) -> Tensor:
        """Outputs `[T, N]`, by the weight as it is; `multiply_reordered` in oneDNN's order."""
        bias = self.bias
        if bias is None:
            return torch.mm(x, self._columns())
        return torch.addmm(bias, x, self._columns())

    def reorder(self, faster: Faster) -> None:
        """Lay the weight out for oneDNN, anew where it changed; `faster` is of `Products`."""
        self._faster = faster
        weight = self.weight
        mark = Mark(weight, [linear.weight for linear in self.linears])
        if self._reordered is None or mark != self._mark:
            self._reordered = None  # of two copies one at a time
            self._reordered, self._mark = onednn.lay_out(weight), mark

    def _columns(self) -> Tensor:
        weight = self._first["weight"]
        assert weight is not None
        if self._is_input_major:
            return weight
        if self._address is None:
            return weight.t()
        rows, width = self.shape
        return weight.as_strided((width, rows), (1, width))

    @property
    def bias(self) -> Tensor | None:
        bias = self._first["bias"]
        if bias is None or self._bias_address is None:
            return bias
        return bias.as_strided((self.shape[0],), (1,))

    def unpack(self) -> None:
        """Give the layers' parameters storages of their own, where they still are views."""
        self._reordered = None
        for hook in self._hooks:
            hook.remove()
        for linear in self.linears:
            for parameter, address in (
                (linear.weight, self._address),
                (linear.bias, self._bias_address),
            ):
                if address is None or type(parameter) is not nn.Parameter:  # quantised since
                    continue
                if parameter.untyped_storage().data_ptr() == address:
                    with torch.inference_mode(False), torch.no_grad():
                        parameter.data = parameter.data.clone()


_numbers = count()
_numbered: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()
_library = torch.library.Library("mmaccel", "FRAGMENT")
_library.define("product(Tensor x, int number, int n) -> Tensor")


@torch.library.impl(_library, "product", "CPU")
def _multiply(x: Tensor, number: int, n: int) -> Tensor:
    """A product as an operator, which compiled code calls as it is."""
    return _numbered[number](x)


@torch.library.register_fake("mmaccel::product", lib=_library)
def _shape_product(x: Tensor, number: int, n: int) -> Tensor:
    return x.new_empty(x.shape[0], n)


@torch.no_grad()
def _pack(parameters: Sequence[Tensor]) -> int:
    """Make parameters views of one tensor, one after the other; returns its address."""
    with torch.inference_mode(False):
        packed = torch.cat([parameter.data for parameter in parameters])
        rows = packed.split([len(parameter) for parameter in parameters])
        for parameter, view in zip(parameters, rows):
            parameter.data = view
    return packed.untyped_storage().data_ptr()


def _separate_storages(
    linear: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """A hook of `state_dict`: tensors over the same memory with storages of their own. What saves
    weights takes tensors of one storage for tied ones, and drops or copies all but one.
    """
    for name in (f"{prefix}weight", f"{prefix}bias"):
        tensor = state.get(name)
        if type(tensor) is not Tensor or tensor.device.type not in ("cpu", "cuda"):
            continue  # a parameter itself, or a device whose memory DLPack may not describe
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            state[name] = torch.from_dlpack(tensor)


def find_unpackable(parts: Sequence[nn.Module]) -> str:
    """What keeps a decoder's parameters from being packed: no plain tensors, several dtypes or
    devices, or storage that something else shares; empty: nothing.
    """
    parameters = [
        parameter
        for part in parts
        for _, parameter in part.named_parameters(remove_duplicate=False)
    ]
    for parameter in parameters:
        if type(parameter) is not nn.Parameter or parameter.is_meta:
            return f"a {type(parameter).__name__} on {parameter.device}"
        if parameter.is_inference() or parameter.is_shared() and parameter.device.type == "cpu":
            return "parameters in shared memory or made in inference mode"
    if len(set(map(id, parameters))) < len(parameters):
        return "layers that share parameters"
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
    if len(kinds) != 1 or not next(iter(kinds))[0].is_floating_point:
        listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        return f"layers with parameters in {listed or 'no dtype'}"
    return ""
