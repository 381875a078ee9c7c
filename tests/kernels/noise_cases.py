"""Philox in Triton: the specification's bits."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from mmaccel.kernels import noise, noise_triton
from tests.kernels.case import Case


@triton.jit
def _gumbel_kernel(uniform, out):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, 512)
    tl.store(out + lane, noise_triton.to_gumbel(tl.load(uniform + lane)))


def _gumbels(device: torch.device, dtype: torch.dtype) -> None:
    """Within 4e-7 of float64, absolute or relative, from the smallest uniform to the largest."""
    low = torch.logspace(-33, -1, 384, base=2.0)
    u = torch.cat([low, 1 - torch.logspace(-24, -1, 128, base=2.0)]).to(device)
    out = torch.full_like(u, float("nan"))
    _gumbel_kernel[(1,)](u, out)
    exact = -(-(-u.double()).log1p()).log()
    torch.testing.assert_close(out.double(), exact, rtol=4e-7, atol=4e-7)


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


def _purposes(device: torch.device, dtype: torch.dtype) -> None:
    """A purpose of each row, every second number of a tensor."""
    seeds, items = torch.arange(3, device=device), torch.arange(3, device=device)
    slots = torch.arange(12, device=device).view(3, 4)
    purpose = torch.tensor([1, 0, 2**32 - 1, 0, 2, 0], device=device)[::2]
    found = noise_triton.uniforms(seeds, items, slots, 3, purpose)
    assert torch.equal(found, noise.uniforms(seeds, items, slots, 3, purpose))
    alone = noise.uniforms(seeds[1:2], items[1:2], slots[1:2], 3, purpose[1])
    assert torch.equal(found[1:2], alone)


_ONCE = (torch.float32,)  # no floating-point input
_SIZES = (1, 63, 100, 1023, 1024, 1025)
CASES = [Case(f"bits of {n}", partial(_bits, n), _ONCE) for n in _SIZES]
CASES += [Case("bits of a large vocabulary", partial(_bits, 262_144), _ONCE, large=True)]
CASES += [Case("strides", _strides, _ONCE)]
CASES += [Case("purposes", _purposes, _ONCE)]
CASES += [Case("gumbels", _gumbels, _ONCE)]
