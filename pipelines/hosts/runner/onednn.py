"""Weights in oneDNN's own order, for products of few rows on a CPU.

torch's `mm` of several rows reads a weight far slower than memory allows where no cache holds it;
oneDNN reads it once, in blocks. So each shape is tried at each number of rows, up to the next power
of two, once for a model. A row's product has the same bits among any number of rows, two or more,
unlike MKL's `mm` in float32; see `PackedLinear.same_bits`.

Departures: what is laid out is a copy, since no view can have its order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.kernels import dispatch
from mmaccel.pipelines.hosts.runner.trial import find_gain
from mmaccel.samplers.compare_logits import Tolerance

MOST_ROWS = 64  # behind which `mm` is as fast
LEAST_BYTES = 64 << 20  # weights of a decoder that caches hold are as fast by `mm`
_GAIN = 1.05  # by how much it must be faster
_TRIALS = 6  # of either way at a shape
_SAMPLES = 64  # entries by which a weight is known again
_UNTRIED = 2  # passes of a number of rows: a prompt or a check alone may have as many

# shapes (N, C) whose products are faster in oneDNN's order, by `find_key`; no key: none was tried
Faster = dict[tuple[int, int], set[tuple[int, ...]]]


def lay_out(weight: Tensor) -> Tensor:
    """A copy of a weight `[N, C]`, float32 or bfloat16 on a CPU, in oneDNN's order."""
    with torch.inference_mode(False), torch.no_grad():
        laid_out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), MOST_ROWS)
    return laid_out


def multiply(x: Tensor, laid_out: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, laid_out, bias, "none", [], "")
    return out


class Mark:
    """By what a weight is known to be unchanged: the versions of its parameters and, as writes
    through `.data` count none, some of its entries.
    """

    def __init__(self, weight: Tensor, parameters: Sequence[Tensor]) -> None:
        flat = weight.flatten() if weight.is_contiguous() else weight.t().flatten()
        self._sample = flat[:: max(1, flat.numel() // _SAMPLES)].clone()
        self._versions = [parameter._version for parameter in parameters]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Mark)
        return self._versions == other._versions and torch.equal(self._sample, other._sample)


class Products:
    """The products of a model's passes, of which some take weights in oneDNN's order on a CPU."""

    def __init__(self, linears: Sequence[Any], faster: Faster) -> None:
        self.linears = linears  # all `PackedLinear`s that multiply
        self.faster = faster  # which is kept for the model
        self.reordered_bytes = 0  # of weights that stand once more in oneDNN's order
        self._n_passes = Counter[tuple[int, int]]()

    def reorder(self, *, of_any_size: bool = False) -> None:
        """Lay out weights that are not yet, or changed since, where it is worth a copy."""
        weights = [linear.weight for linear in self.linears]
        least_bytes = 0 if of_any_size else LEAST_BYTES
        if self.reordered_bytes or may_lay_out(weights, least_bytes=least_bytes):
            for linear in self.linears:
                linear.reorder(self.faster)
            self.reordered_bytes = sum(weight.nbytes for weight in weights)

    def prepare(self, n_rows: int, *, at_once: bool = False) -> bool:
        """Whether some products of so many rows are faster so, tried once, after some passes."""
        if not self.reordered_bytes or n_rows > MOST_ROWS:
            return False
        key = find_key(n_rows)
        self._n_passes[key] += 1
        if key not in self.faster and (at_once or self._n_passes[key] > _UNTRIED):
            self._try(n_rows)
        return bool(self.faster.get(key))

    @torch.no_grad()
    def _try(self, n_rows: int) -> None:
        """Both ways take turns over weights of different layers, which no cache holds."""
        by_shape = defaultdict(list)
        for linear in self.linears:
            linear.reorder(self.faster)
            by_shape[linear.shape].append(linear)
        faster = self.faster[find_key(n_rows)] = set()
        for shape, linears in by_shape.items():
            chosen = [linears[k * len(linears) // _TRIALS] for k in range(_TRIALS)]
            cases = []
            for linear in [linears[0], *chosen]:  # the first compiles what it runs
                inputs = linear.weight[0].expand(n_rows, -1).contiguous()
                ways = linear.multiply, linear.multiply_reordered
                cases.append((partial(ways[0], inputs), partial(ways[1], inputs)))
            tolerance = Tolerance(max(1e-5, torch.finfo(linear.weight.dtype).eps))
            if find_gain(cases, tolerance) > _GAIN:
                faster.add(shape)

    def unpack(self) -> None:
        for linear in self.linears:
            linear.unpack()
        self.reordered_bytes = 0


def find_key(n_rows: int) -> tuple[int, int]:
    """Where `Products` has those of so many rows: by threads and the next power of two."""
    return torch.get_num_threads(), 1 << (n_rows - 1).bit_length()


def may_lay_out(weights: Sequence[Tensor], *, least_bytes: int) -> bool:
    """Whether a decoder's weights are worth a copy, and there is memory for it twice."""
    n_bytes = sum(weight.nbytes for weight in weights)
    return (
        weights[0].device.type == "cpu"
        and dispatch.mode() != "torch"
        and not find_lack(weights[0].dtype)
        and least_bytes <= n_bytes <= _available_bytes() // 2
    )


def find_lack(dtype: torch.dtype) -> str:
    """What this torch and processor lack for products in a dtype; empty where they have it."""
    operators: Any = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(operators, "_linear_pointwise"):
        return "a torch without oneDNN's products"
    if dtype == torch.bfloat16 and not operators._is_mkldnn_bf16_supported():
        return "a processor without products in bfloat16"
    return "" if dtype in (torch.float32, torch.bfloat16) else f"weights in {dtype}"


def _available_bytes() -> int:
    """Memory that may be had; 0 where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return 0
    return int(text.partition("MemAvailable:")[2].split()[0]) << 10
