"""Philox in Triton: the specification's bits."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from mmaccel.kernels import noise, noise_triton
from tests.kernels.case import Case


@triton.jit
def _gumbel_kernel(uniform, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, BLOCK)
    tl.store(out + index, noise_triton.gumbel(tl.load(uniform + index)))


def _gumbels(device: torch.device, dtype: torch.dtype) -> None:
    """From the least uniform to the largest, against doubles; float32 leaves 24 bits of 23."""
    powers = 2.0 ** -torch.linspace(0, 33, 500)
    uniform = torch.cat([powers, 1 - powers, torch.tensor([0.25, 0.24999999, 0.5])])
    uniform = uniform.clamp(2.0**-33, 1 - 2.0**-24)
    uniform = torch.cat([uniform, torch.full((1024 - len(uniform),), 0.75)]).to(device)
    out = torch.full_like(uniform, float("nan"))
    _gumbel_kernel[(1,)](uniform, out, BLOCK=1024)
    exact = -(-(-uniform.double()).log1p()).log()
    assert bool(((out - exact).abs() <= 4e-6).all())


def _bits(n_values: int, device: torch.device, dtype: torch.dtype) -> None:
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**40) + 7], device=device)
    items = torch.tensor([0, 1, 2**32 - 1, 77], device=device)
    slots = torch.tensor([[0, 1, 300], [5, 6, 2**32 - 1], [9, 9, 9], [2, 70000, 4]], device=device)
    purpose = torch.tensor(2**31 + 3, device=device)
    args = (seeds, items, slots, n_values, purpose)
    assert noise_triton.refuse_uniforms(*args) is None
    expected = noise.uniforms(*args)
    assert torch.equal(noise_triton.uniforms(*args), expected)
    assert expected.shape == (4, 3, n_values)


def _strides(device: torch.device, dtype: torch.dtype) -> None:
    """Slots of a larger tensor, every second seed."""
    seeds = torch.arange(8, device=device)[::2]
    items = torch.zeros(4, dtype=torch.int64, device=device)
    slots = torch.arange(40, device=device).view(4, 10)[:, 3:8].flip(1)
    purpose = torch.zeros((), dtype=torch.int64, device=device)
    args = (seeds, items, slots, 63, purpose)
    assert torch.equal(noise_triton.uniforms(*args), noise.uniforms(*args))


_ONCE = (torch.float32,)  # no floating-point input
_SIZES = (1, 63, 100, 1023, 1024, 1025)
CASES = [Case(f"bits of {n}", partial(_bits, n), _ONCE) for n in _SIZES]
CASES += [Case("bits of a large vocabulary", partial(_bits, 262_144), _ONCE, large=True)]
CASES += [Case("strides", _strides, _ONCE)]
CASES += [Case("gumbels", _gumbels, _ONCE)]
