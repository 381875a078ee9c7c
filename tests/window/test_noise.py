"""Philox against published vectors and a second implementation; the noise's guarantees."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mmaccel import Noise
from mmaccel.errors import OptionError
from mmaccel.kernels import dispatch
from mmaccel.kernels.noise import key_schedule, philox, to_gumbel, to_uniform
from mmaccel.samplers.noise import Stream, choose_seed, draw_new_seed
from tests.fixtures.graph_replay import count_operations

ONES = 0xFFFFFFFF
# Random123's known-answer file (kat_vectors, philox4x32 with 10 rounds): counter, key, result.
KNOWN = {
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


def philox_by_hand(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Ten rounds in unbounded integers."""
    a, b, c, d = counter
    k, l = key
    for _ in range(10):
        high0, low0 = divmod(a * 0xD2511F53, 2**32)
        high1, low1 = divmod(c * 0xCD9E8D57, 2**32)
        a, b, c, d = high1 ^ b ^ k, low1, high0 ^ d ^ l, low0
        k, l = (k + 0x9E3779B9) % 2**32, (l + 0xBB67AE85) % 2**32
    return a, b, c, d


def words(values: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize("counter, key, result", KNOWN.values(), ids=KNOWN)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], result: tuple[int, ...]
) -> None:
    assert tuple(int(w) for w in philox(words(counter), key_schedule(words(key)))) == result
    assert philox_by_hand(counter, key) == result


def test_uniform_and_gumbel_by_hand() -> None:
    """Where the counter's words come from, and the two transformations, in Python floats."""
    noise = Noise.from_seed(2**63 + 5, 3)
    key = (5, 2**31)
    fresh = noise.fresh(torch.tensor([[7, 9]] * 3), 4)
    frozen = noise.gumbel(torch.tensor([[7]] * 3), 6)
    for item in range(3):
        for w, slot in enumerate((7, 9)):
            block = philox_by_hand((0, slot, item, 1 | 4 << 8), key)
            for word, kind in zip(block, (fresh.coins, fresh.redraws, fresh.drafts)):
                assert float(kind[item, w]) == pytest.approx((word + 0.5) / 2**32, rel=1e-6)
        row = [
            w for block in range(2) for w in philox_by_hand((block, 7, item, 0), key)
        ]  # four words a block, in order
        for v in range(6):
            wanted = -math.log(-math.log1p(-(row[v] + 0.5) / 2**32))
            assert float(frozen[item, 0, v]) == pytest.approx(wanted, rel=1e-5, abs=1e-5)


def test_ends_of_the_uniforms() -> None:
    ends = to_uniform(torch.tensor([0, 1, ONES]))
    assert ends.dtype == torch.float32
    assert ends.tolist() == [2**-33, 1.5 * 2**-32, 1 - 2**-24]
    extremes = to_gumbel(to_uniform(torch.tensor([0, ONES])))
    assert extremes.isfinite().all()
    assert extremes[0] == pytest.approx(-math.log(-math.log1p(-(2.0**-33))), rel=1e-6)  # 22.87
    assert extremes[1] == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)  # -2.81


OWN = Noise.from_seed(3, 2), torch.tensor([[0, 1], [5, 2]])


@pytest.mark.parametrize("size", [1, 4, 5, 63])
def test_a_larger_vocabulary_begins_the_same(size: int) -> None:
    noise, slots = OWN
    assert noise.gumbel(slots, size).shape == (2, 2, size)
    assert noise.gumbel(slots, size).equal(noise.gumbel(slots, 64)[..., :size])


def test_seed_item_slot_stream_and_step_all_matter() -> None:
    slots = torch.tensor([[0, 1]])

    def made(seed: int, item: int, stream: Stream, step: int) -> list[float]:
        noise = Noise(torch.tensor([seed]), torch.tensor([item]))
        return noise.gumbel(slots, 3, stream, step).flatten().tolist()

    variants = [made(0, 0, Stream.FROZEN, 0), made(1, 0, Stream.FROZEN, 0)]
    variants += [made(1 << 32, 0, Stream.FROZEN, 0), made(-1, 0, Stream.FROZEN, 0)]
    variants += [made(0, 1, Stream.FROZEN, 0), made(0, 0, Stream.FROZEN, 1)]
    variants += [made(0, 0, stream, 0) for stream in Stream if stream != Stream.FROZEN]
    variants += [made(0, 0, stream, 1) for stream in Stream if stream != Stream.FROZEN]
    numbers = [number for variant in variants for number in variant]
    assert len(set(numbers)) == len(numbers)


def test_greedy_needs_no_noise() -> None:
    noise, slots = OWN
    assert noise.frozen(slots, 7, 0.5).equal(noise.gumbel(slots, 7))
    assert noise.frozen(slots, 7, 0.0).equal(torch.zeros(2, 2, 1))


def test_none_and_minus_one_draw_a_seed_below_32_bits() -> None:
    torch.manual_seed(5)
    drawn = [choose_seed(None), choose_seed(-1), *choose_seed([None, -1])]  # type: ignore[misc]
    assert len(set(drawn)) == 4 and all(0 <= seed < 2**32 for seed in drawn)
    torch.manual_seed(5)
    assert choose_seed([7, None, 2**64 - 1, -1]) == [7, drawn[0], 2**64 - 1, drawn[1]]
    torch.manual_seed(5)
    assert Noise.from_seed(-1, 1).seeds.tolist() == drawn[:1]
    assert draw_new_seed() != draw_new_seed() < 2**32
    for bad in (-2, [3, -(2**63)], 2**64):
        with pytest.raises(OptionError, match="64-bit integer that is not negative, or -1 to draw"):
            choose_seed(bad)


def test_moments_and_distribution() -> None:
    n = 200_000
    slots = torch.arange(n // 4).reshape(1, -1)
    gumbel = Noise.from_seed(1, 1).gumbel(slots, 4).double().flatten()
    error = math.pi / math.sqrt(6 * n)
    assert float(gumbel.mean()) == pytest.approx(0.5772156649, abs=4 * error)
    assert float(gumbel.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)
    assert kolmogorov(torch.exp(-torch.exp(-gumbel))) < 1.95 / math.sqrt(n)  # level 0.001
    for uniforms in Noise.from_seed(1, 4).fresh(slots.reshape(4, -1), 0):
        uniform = uniforms.double().flatten()
        assert float(uniform.mean()) == pytest.approx(0.5, abs=4 / math.sqrt(12 * n / 4))
        assert kolmogorov(uniform) < 1.95 / math.sqrt(n / 4)


def kolmogorov(values: Tensor) -> float:
    """Largest distance of the empirical distribution from the uniform one."""
    ordered, n = values.sort().values, values.numel()
    rank = torch.arange(n + 1).double() / n
    return max(float((ordered - rank[:-1]).max()), float((rank[1:] - ordered).max()))


@pytest.mark.parametrize("step", [3, torch.tensor(3), torch.tensor([3, 0, 2**24 - 1])])
def test_the_kernel_s_fresh_numbers_are_those_of_torch(
    step: int | Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch of the `noise` kernel instead of Philox in torch, for rows of any pass."""
    noise = Noise.from_seed([5, 6, 2**63], 3)
    slots = torch.arange(6).view(3, 2) + 40
    expected, gumbel = noise.fresh(slots, step), noise.gumbel(slots, 7, Stream.CHOICE, step)
    n_plain = count_operations(lambda: noise.fresh(slots, step))
    monkeypatch.setattr(dispatch, "uses_triton", lambda *_: True)
    for made, known in zip(noise.fresh(slots, step), expected, strict=True):
        assert made.equal(known)
    assert noise.gumbel(slots, 7, Stream.CHOICE, step).equal(gumbel)
    launch = torch.zeros(3, 2, 3)
    monkeypatch.setattr(dispatch, "run", lambda *_: launch.clone())  # an operation, as a launch
    n_launched = count_operations(lambda: noise.fresh(slots, step))
    assert n_launched <= 8 and n_plain > 10 * n_launched
