"""Residual addition and norms in Triton against the specification.

Tolerance: a mean of up to 5000 squares in another order of summing, and one rounding to the dtype.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mmaccel.kernels import add_norm as specification
from mmaccel.kernels import add_norm_triton as triton_version
from mmaccel.kernels.norm import Norm, NormKind
from tests.kernels.case import Case

_OFF = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def draw(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 1) -> Tensor:
    """Normal numbers around 0.3, so that a mean that is not subtracted is seen."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) + 0.3).to(device, dtype)


def _compare(
    hidden: Tensor,
    update: Tensor | None,
    norm: Norm | None,
    post: Norm | None = None,
    scale: float = 1.0,
) -> None:
    args = (hidden, update, norm)
    assert triton_version.refuse_add_norm(*args, post=post, scale=scale) is None
    expected = specification.add_norm(*args, post=post, scale=scale)
    total, normed = triton_version.add_norm(*args, post=post, scale=scale)
    assert (total is hidden) == (update is None) and (normed is total) == (norm is None)
    off = _OFF[hidden.dtype]
    for received, wanted in zip((total, normed), expected):
        assert received.shape == wanted.shape and received.dtype == wanted.dtype
        torch.testing.assert_close(received, wanted, atol=2 * off, rtol=2 * off)


def _rows(width: int, kind: NormKind, device: torch.device, dtype: torch.dtype) -> None:
    """With and without update, weight and bias; an offset, a scale, a large eps."""
    hidden, update = (draw(device, dtype, 5, width, seed=seed) for seed in (1, 2))
    weight, bias = (draw(device, dtype, width, seed=seed) for seed in (3, 4))
    _compare(hidden, update, Norm(weight, None, kind))
    _compare(hidden, None, Norm(weight, bias, kind))
    _compare(hidden, update, Norm(weight, bias, kind, 1.0, 0.5), scale=0.25)
    _compare(hidden, update, Norm(None, None, kind))
    _compare(hidden, None, None)
    _compare(hidden, update, None, scale=0.25)


def _posts(width: int, kind: NormKind, device: torch.device, dtype: torch.dtype) -> None:
    """A norm of the update, with everything else and alone; of rows that lie in wider ones."""
    hidden, update = (draw(device, dtype, 5, width + 3, seed=seed)[:, 2:-1] for seed in (1, 2))
    weight, bias, other = (draw(device, dtype, width, seed=seed) for seed in (3, 4, 5))
    for post in (Norm(weight, bias, kind, 1.0, 0.5), Norm(None, None, kind)):
        _compare(hidden, update, Norm(other, None, "rms"), post, 0.25)
        _compare(hidden, update, Norm(other, bias, "layer", 1.0, 1e-5), post)
        _compare(hidden, update, None, post)


def _refusals(device: torch.device, dtype: torch.dtype) -> None:
    refuse, rows = triton_version.refuse_add_norm, draw(device, dtype, 4, 8)
    assert "float64" in (refuse(rows.double(), None, None) or "")
    assert "axes" in (refuse(rows[None], None, None) or "")
    assert "apart" in (refuse(rows[:, ::2], None, None) or "")


_WIDTHS = (1, 33, 128, 5000)
_NORM_KINDS: tuple[NormKind, ...] = ("rms", "layer")
CASES = [Case(f"{k} of {n}", partial(_rows, n, k)) for n in _WIDTHS for k in _NORM_KINDS]
CASES += [
    Case(f"{k} of {n} before the addition", partial(_posts, n, k))
    for n in _WIDTHS
    for k in _NORM_KINDS
]
CASES += [Case("refusals", _refusals, (torch.float32,))]
