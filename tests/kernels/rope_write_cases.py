"""Rotary positions and the write into the cache in Triton against the specification."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmaccel.kernels import rope_write as specification
from mmaccel.kernels import rope_write_triton as triton_version
from mmaccel.kernels.norm import HeadNorms, NormKind
from mmaccel.kernels.rope_write import sign_sine
from tests.kernels.case import Case, poison

_OFF = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def _draw(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1])).to(device, dtype)


def _compare(
    heads: int, kv_heads: int, width: int, n_turned: int, interleaved: bool, grouped: bool,
    device: torch.device, dtype: torch.dtype, norms: HeadNorms | None = None,
) -> None:  # fmt: skip
    """Seven tokens into a cache of 12 places, values in a store with wider rows."""
    qkv = _draw(device, dtype, 7, (heads + 2 * kv_heads) * width)
    angles = _draw(device, torch.float32, 7, n_turned)
    pair = None, None
    if n_turned:
        pair = angles.cos().to(dtype), sign_sine(angles.sin().to(dtype), interleaved)
    index = torch.tensor([11, 0, 3, 4, 9, 1, 6], device=device)
    stores = [
        (poison((12, kv_heads, width), dtype, device),
         poison((12, kv_heads + 1, width), dtype, device)[:, 1:])
        for _ in range(2)
    ]  # fmt: skip
    options: dict[str, Any] = dict(interleaved=interleaved, grouped=grouped, norms=norms)
    assert triton_version.refuse_rope_write(qkv, *pair, *stores[0], index, **options) is None
    made, expected = (
        version.rope_write(qkv, *pair, *store, index, **options)
        for version, store in zip((triton_version, specification), stores)
    )
    off = {"atol": 2 * _OFF[dtype], "rtol": 2 * _OFF[dtype], "equal_nan": True}
    torch.testing.assert_close(made, expected, **off)
    for received, wanted in zip(*stores):
        torch.testing.assert_close(received, wanted, **off)
    by_head = qkv.view(7, -1, width)
    own = by_head.unflatten(1, (kv_heads, -1))[:, :, -1] if grouped else by_head[:, -kv_heads:]
    assert torch.equal(stores[0][1][index], own)


def _normalise(
    heads: int, kv_heads: int, width: int, n_turned: int, form: str, kind: NormKind,
    device: torch.device, dtype: torch.dtype,
) -> None:  # fmt: skip
    """With weights alone, with all there is, and without any; in groups too."""
    generator = torch.Generator().manual_seed(3)

    def draw(n_heads: int) -> Tensor:
        shape = {"one": (width,), "each": (n_heads, width), "flat": (n_heads * width,)}[form]
        return (torch.randn(shape, generator=generator) + 0.3).to(device, dtype)

    weights, biases = (draw(heads), draw(kv_heads)), (draw(heads), draw(kv_heads))
    choices = [HeadNorms(*weights, kind=kind), HeadNorms(*weights, *biases, kind, 1.0, 0.5)]
    if form == "one":
        choices.append(HeadNorms(None, None, kind=kind))
    for number, norms in enumerate(choices):
        interleaved = number % 2 == (kind == "layer")  # each kind of norm sees both
        _compare(heads, kv_heads, width, n_turned, interleaved, False, device, dtype, norms)
    if form != "flat":
        _compare(heads, kv_heads, width, n_turned, False, True, device, dtype, choices[1])


def _refusals(device: torch.device, dtype: torch.dtype) -> None:
    refuse, qkv = triton_version.refuse_rope_write, _draw(device, dtype, 2, 12)
    store, index = qkv.new_zeros(4, 1, 4), torch.arange(2, device=device)
    assert "float64" in (refuse(qkv.double(), None, None, store, store, index) or "")
    assert "cache" in (refuse(qkv, None, None, store.half(), store, index) or "")
    wide = qkv.new_zeros(4, 1, 8)[..., ::2]
    assert "apart" in (refuse(qkv, None, None, wide, store, index) or "")
    many, one = qkv.new_zeros(2, 4100 * 4), qkv.new_zeros(4)
    norms = HeadNorms(qkv.new_zeros(4098 * 4), one)
    assert "16392 numbers" in (refuse(many, None, None, store, store, index, norms=norms) or "")
    norms = HeadNorms(qkv.new_zeros(8), one)
    args = (qkv.new_zeros(2, 16), None, None, store, store, index)
    assert "groups" in (refuse(*args, norms=norms, grouped=True) or "")
    assert refuse(*args, norms=norms) is None


_SHAPES = ((1, 1, 4, 4), (4, 4, 64, 64), (6, 2, 80, 80), (4, 1, 24, 10), (3, 3, 33, 0))
CASES = [
    Case(
        f"{h} and {k} heads of {d}, {n} turned{', neighbours' * kind}",
        partial(_compare, h, k, d, n, kind, False),
    )
    for h, k, d, n in _SHAPES
    for kind in (False, True)
]
CASES += [
    Case(
        f"{h} and {k} heads of {d} in groups, {n} turned",
        partial(_compare, h, k, d, n, False, True),
    )
    for h, k, d, n in ((1, 1, 4, 4), (3, 3, 24, 8), (6, 2, 80, 80), (4, 1, 33, 0))
]
_KINDS: tuple[NormKind, ...] = ("rms", "layer")
CASES += [
    Case(
        f"{h} and {k} heads of {d}, {n} turned, after {kind} norms, {form}",
        partial(_normalise, h, k, d, n, form, kind),
    )
    for h, k, d, n in ((2, 2, 64, 64), (6, 2, 80, 80), (4, 1, 24, 10), (3, 3, 33, 0))
    for form in ("one", "each", "flat")
    for kind in _KINDS
]
CASES += [Case("refusals", _refusals, (torch.float32,))]
