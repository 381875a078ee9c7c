"""The number format of a run's forward passes, which decides what `bitwise` means.

A position is computed in passes of several widths. In float32 and float64 the sums of these passes
differ in their last bits, which practically never changes a token; in shorter formats it often
does. So the format that counts is the coarsest one on the way to the logits. A model may switch
autocast on inside its own forward and return float32, as accelerate's mixed precision does: that is
seen in what the layers computed, and nowhere outside.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "convolution")


class ProductFormats(TorchDispatchMode):
    """Collects the dtypes of the matrix products that a block of code computes.

    Attributes:
        found: so far.

    Cost: some microseconds for each operation in the block; compiled code in it runs eagerly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _PRODUCTS and isinstance(out, Tensor):
            self.found.add(out.dtype)
        return out


def find_arithmetic(
    model: Any, logits: Tensor, products: Collection[torch.dtype] | None = None
) -> str:
    """The number format of a pass.

    What the model says of itself (`activation_format`), as a quantised one does. Else the coarsest
    of: the model's own dtype, those of products inside the pass, that of its logits, that of
    autocast where it is on, and what torch was told to compute float32 products in
    (`torch.set_float32_matmul_precision`).

    Args:
        model: a token model or denoiser.
        logits: what its pass returned.
        products: dtypes of products inside the pass; None takes the model's `product_dtypes`.

    Returns:
        The name of a dtype, such as "bfloat16"; "tf32", "bf16" for shortened float32 products; or
        what activations are quantised to, such as "int8".
    """
    quantized: str = model.activation_format
    if quantized:
        return quantized
    kind = logits.device.type
    own = getattr(model if model.model is None else model.model, "dtype", None)
    found = [logits.dtype, *([own] if isinstance(own, torch.dtype) else [])]
    found += model.product_dtypes if products is None else products
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        found.append(torch.get_autocast_dtype(kind))
    coarsest = max((dtype for dtype in found if dtype.is_floating_point), key=_spacing)
    if coarsest == torch.float32:
        return find_product_format(kind)
    return str(coarsest).removeprefix("torch.")


def find_product_format(kind: str) -> str:
    """What torch computes float32 matrix products in on a kind of device: "float32", or "tf32" or
    "bf16" where `torch.set_float32_matmul_precision` or `torch.backends` asks for it.
    """
    read = getattr(torch._C, "_get_fp32_precision_getter", None)
    if read is None:  # torch before 2.9
        return "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    found: str = read("cuda" if kind == "cuda" else "mkldnn", "matmul")
    return "float32" if found in ("ieee", "none") else found


def _spacing(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
