"""The number format of a run's forward passes, which decides what `bitwise` means.

A position is computed in passes of several widths. In float32 and float64 the sums of these passes
differ in their last bits, which practically never changes a token; in shorter formats it often
does. So the format that counts is the coarsest one on the way to the logits. What a model casts
inside its forward, or autocast does there (accelerate), is seen in a pass's products alone.

Under a caller's `torch.autocast` only the model's passes are computed as the caller's would be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_IS_PRODUCT = re.compile(r"mm|mv$|linear|matmul|convolution|attention").search  # names in aten
_KINDS = ("cpu", "cuda", "xpu", "mps")  # of devices that have autocast
_call = local()  # `casts`: kinds and dtypes of the autocast of the call that a thread serves


@contextmanager
def own_arithmetic() -> Iterator[None]:
    """Inside, autocast is off but in passes of models (`as_called`)."""
    before = getattr(_call, "casts", ())
    kinds = [kind for kind in _KINDS if torch.amp.is_autocast_available(kind)]
    _call.casts = [
        (kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)
    ]
    try:
        with _autocast(is_on=False):
            yield
    finally:
        _call.casts = before


@contextmanager
def as_called() -> Iterator[None]:
    """Around a pass of a model inside `own_arithmetic`: the autocast that is on around that."""
    with _autocast(is_on=True):
        yield


def _autocast(is_on: bool) -> ExitStack:
    stack = ExitStack()
    for kind, dtype in getattr(_call, "casts", ()):
        stack.enter_context(torch.autocast(kind, dtype, enabled=is_on))
    return stack


class PassFormats(TorchDispatchMode):
    """What the passes of one run are computed in, seen in the first one that is no replay.

    `name` is a dtype's, "tf32" or "bf16" of shortened float32 products, or what activations are
    quantised to, such as "int8"; empty before the first pass. Cost: some microseconds for each
    operation of that pass. Of compiled code it sees the products that are calls of their own.
    """

    supports_higher_order_operators = True  # such as flex attention

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.name = model.known_format or ""
        self._model = model
        self._operands: set[torch.dtype] = set()  # formats of operands of products
        self._has_run = False  # any operation
        self._is_known = bool(self.name)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Around a pass of the model."""
        with as_called(), nullcontext() if self._is_known else self:
            yield

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compilation goes on as without this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._has_run = True
        if _IS_PRODUCT(getattr(func, "overloadpacket", func).__name__):
            self._operands |= {each.dtype for each in args if isinstance(each, Tensor)}
        return func(*args, **(kwargs or {}))

    def note(self, logits: Tensor) -> None:
        """Note what the pass returned that has just ended: what the model says of itself
        (`Route.activations`) or a quantised one does, else the coarsest of its parameters, operands
        of products below float32, the logits, and torch's own float32 products.
        """
        if self._is_known:
            return
        self._is_known = self._has_run
        module = self._model.model
        weights = () if module is None else module.parameters()
        formats = {logits.dtype, *(weight.dtype for weight in weights)}
        formats |= {each for each in self._operands if _spacing(each) > _spacing(torch.float32)}
        coarsest = max(formats, key=_spacing)
        name = str(coarsest).removeprefix("torch.")
        if coarsest == torch.float32:
            name = find_product_format(logits.device.type)
        self.name = self._model.route.activations or name
        if self._model.known_format is not None:
            self._model.known_format = self.name


def find_product_format(kind: str) -> str:
    """In what torch multiplies float32 matrices there: "float32", "tf32" or "bf16"."""
    read = getattr(torch._C, "_get_fp32_precision_getter", None)
    if read is None:  # torch before 2.9
        return "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    precision: str = read("cuda" if kind == "cuda" else "mkldnn", "matmul")
    return "float32" if precision in ("ieee", "none") else precision


def _spacing(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
