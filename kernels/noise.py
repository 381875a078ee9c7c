"""Philox 4x32-10, the counter-based generator behind every random choice.

J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011, section 3.3. A number is a function of (key, counter): nothing is stored, so that a value
can be computed again at any later pass, on any device and in any batch; the Triton version gives
the same bits. 32-bit words are held in int64 tensors, since torch lacks unsigned arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_LOW = 0xFFFFFFFF
_ALMOST_ONE = 1.0 - 2.0**-24


def key_schedule(key: tuple[Tensor, Tensor]) -> Tensor:
    """A key, two 32-bit words, for all rounds: `[ROUNDS, 2, ...]` int64, the second word first."""
    rounds = torch.arange(ROUNDS, device=key[0].device).view(-1, *[1] * key[0].ndim)
    words = [(word + rounds * weyl) & _LOW for word, weyl in zip(key, WEYL, strict=True)]
    return torch.stack(words[::-1], 1)


def philox(counter: tuple[Tensor, ...], schedule: Tensor) -> tuple[Tensor, ...]:
    """Encrypt counters, four tensors of 32-bit words; four of the broadcast shape.

    Inputs broadcast; words constant along an axis stay small until rounds have mixed them. The key
    of `schedule` has as many axes as the result or is a scalar.
    """
    shape = torch.broadcast_shapes(schedule.shape[2:], *(word.shape for word in counter))
    keys = schedule.unbind()
    c0, c1, c2, c3 = counter
    done = 0
    while done < ROUNDS and not c0.shape == c2.shape == shape:
        c0, c1, c2, c3 = _mix(c0, c1, c2, c3, keys[done])
        done += 1
    if done < ROUNDS:
        even = torch.stack([c2.expand(shape), c0.expand(shape)])
        odd = torch.stack([c3.expand(shape), c1.expand(shape)])
        del c1, c3  # what is this large is not held twice
        c2, c0 = even.unbind()
        product = torch.empty_like(odd)
        halves, others = product.unbind(), odd.unbind()
        for key_pair in keys[done:]:
            torch.mul(c0, MULTIPLIERS[0], out=halves[0])
            torch.mul(c2, MULTIPLIERS[1], out=halves[1])
            torch.bitwise_right_shift(product, 32, out=even)
            even.bitwise_xor_(odd).bitwise_xor_(key_pair).bitwise_and_(_LOW)
            odd, product = product, odd  # upper halves stand: the mask above cuts them off
            others, halves = halves, others
        c3, c1 = odd.bitwise_and_(_LOW).unbind()
    return tuple(word.expand(shape) for word in (c0, c1, c2, c3))


def _mix(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    """One round: four words that broadcast to four words."""
    k1, k0 = key.unbind()
    product0 = c0 * MULTIPLIERS[0]  # wraps like uint64, so that both halves are right
    product1 = c2 * MULTIPLIERS[1]
    upper0 = ((product1 >> 32) ^ (c1 ^ k0)) & _LOW
    upper2 = ((product0 >> 32) ^ (c3 ^ k1)) & _LOW
    return upper0, product1 & _LOW, upper2, product0 & _LOW


def uniforms(seeds: Tensor, items: Tensor, slots: Tensor, n_values: int, purpose: Tensor) -> Tensor:
    """Uniforms `[B, W, V]` float32 of every value of every slot `[B, W]` int64: a function of
    (seed, item, slot, purpose, value). Value v is word v mod 4 of block v div 4, whatever V is.

    Seeds and items are `[B]` int64, all but seeds in 0..2^32-1. `purpose` `[]` or `[B]` is what the
    numbers are for, on the device, so that a captured step can move it on.
    """
    blocks = torch.arange((n_values + 3) // 4, device=slots.device)
    seed = seeds[:, None, None]
    schedule = key_schedule((seed & _LOW, (seed >> 32) & _LOW))
    # [V / 4], [B, W, 1], [B, 1, 1] and [1 or B, 1, 1]: the four words of each counter
    counter = (blocks, slots[..., None], items[:, None, None], purpose.view(-1, 1, 1))
    return spread(philox(counter, schedule), n_values)


def spread(words: tuple[Tensor, ...], n_values: int) -> Tensor:
    """Four words `[..., V / 4]` as uniforms `[..., V]`, those of a block together."""
    mixed = torch.empty(*words[0].shape, 4, dtype=torch.float32, device=words[0].device)
    for k, word in enumerate(words):  # converted as it is written: int64 of all would be twice
        mixed[..., k] = word
    return to_uniform(mixed.flatten(-2))[..., :n_values]


def to_uniform(word: Tensor) -> Tensor:
    """32-bit words in int64 to float32 in [2^-33, 1 - 2^-24], of full relative precision near 0."""
    return word.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_ALMOST_ONE)


def to_gumbel(uniform: Tensor) -> Tensor:
    """Uniforms to standard Gumbel noise, in place, ``-log(-log1p(-u))``: float32 resolves u near 0,
    from which the largest values come, to 24 bits, so that the right tail is exact up to 22.8 and
    not cut at 16.6 as with ``-log(-log(u))``.
    """
    return uniform.neg_().log1p_().neg_().log_().neg_()
