"""`uniforms` on a CPU, in numpy, which takes a third of the time for small arrays."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mmaccel.kernels.noise import MULTIPLIERS, ROUNDS, WEYL, to_uniform

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIERS = np.array(MULTIPLIERS, np.uint64).reshape(2, 1, 1, 1)
_WEYL = np.arange(ROUNDS, dtype=np.uint64)[:, None] * np.array(WEYL, np.uint64)  # [ROUNDS, 2]


def uniforms(seeds: Tensor, items: Tensor, slots: Tensor, n_values: int, purpose: Tensor) -> Tensor:
    n_blocks = (n_values + 3) // 4
    seed = seeds.numpy().astype(np.uint64)
    keys = np.stack([seed & _LOW, seed >> _HALF])  # [2, B]
    schedule = ((keys + _WEYL[..., None]) & _LOW)[..., None, None]  # [ROUNDS, 2, B, 1, 1]
    even, odd, product = np.empty((3, 2, *slots.shape, n_blocks), np.uint64)
    even[0], odd[0] = np.arange(n_blocks), slots.numpy()[..., None]
    even[1], odd[1] = items.numpy()[:, None, None], purpose.numpy().reshape(-1, 1, 1)
    for key in schedule:
        np.multiply(even, _MULTIPLIERS, out=product)
        product = product[::-1]  # each half is mixed into the other one
        np.right_shift(product, _HALF, out=even)
        even ^= odd
        even ^= key
        even &= _LOW  # upper halves that stand in `odd` are cut off here
        odd, product = product, odd
    odd &= _LOW
    mixed = torch.empty(*slots.shape, n_blocks, 4, device="cpu", dtype=torch.float32)
    values = mixed.numpy()
    for k, word in enumerate((even[0], odd[0], even[1], odd[1])):
        values[..., k] = word
    return to_uniform(mixed.flatten(-2))[..., :n_values]
