"""Sampling with frozen noise: the specification's tokens, peaks and normalisers.

Logits are nearly flat as a rule, so that a token too many or too few shows in the logsumexp.
"""

from __future__ import annotations

from functools import partial

import torch

from mmaccel.kernels import sample
from mmaccel.kernels.sample import Settings
from tests.kernels import sample_path_cases
from tests.kernels.case import ONCE, Case, Lane
from tests.kernels.sample_check import check, random_logits

NEVER = float("-inf")
PLAIN = Settings()
EVERYTHING = Settings(2.5, 1.5, 0.8, 40, 0.9, 0.02)


def _size(n_values: int, settings: Settings, lane: Lane) -> None:
    branches = 1 if settings.scale == 1 else 2
    check(
        lane, random_logits(branches, 2, n_values).to(lane.device, lane.dtype), settings, branches
    )


def _same_tokens(lane: Lane) -> None:
    """Token identity, without any allowance, on a vocabulary of 1000."""
    if lane.device.type != "cpu":
        return  # torch's own logarithms differ between devices
    logits = random_logits(4, 3, 1000).to(lane.dtype)
    slots = torch.arange(6).view(2, 3)
    args = (torch.arange(2), torch.arange(2), slots, torch.tensor(0))
    settings = Settings(scale=1.5, temperature=0.9, top_k=700)
    expected = sample.sample_frozen(logits, 2, settings, None, *args)
    made = lane.call(sample.sample_frozen, logits, 2, settings, None, *args)
    lane.expect("tokens", made.tokens, expected.tokens)
    assert made.tokens.unique().numel() > 3


def _three_branches(lane: Lane) -> None:
    check(lane, random_logits(6, 2, 100).to(lane.device, lane.dtype), Settings(3.0, 1.5, 1.3), 3)


def _strides(lane: Lane) -> None:
    """A slice of a wider head, windows and rows swapped."""
    wide = random_logits(3, 4, 200).to(lane.device, lane.dtype).transpose(0, 1)[:, 1:, 37:137]
    check(lane, wide, Settings(scale=2.0, top_k=20), 2)


def _ties(settings: Settings, n_values: int, lane: Lane) -> None:
    """A few values alone, some of them zeros of both signs: boundaries fall among equals."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randint(-1, 2, (1, 2, n_values), generator=generator) * 0.5
    signs = torch.randint(0, 2, logits.shape, generator=generator) * 2.0 - 1.0
    logits = torch.where(logits == 0, 0.0 * signs, logits)
    check(lane, logits.to(lane.device, lane.dtype), settings)


def _neighbours(lane: Lane) -> None:
    """Scores a unit in the last place apart, so that the last bits of a threshold count."""
    steps = torch.randperm(100, generator=torch.Generator().manual_seed(5)).view(1, 1, 100)
    check(lane, (1.0 + steps * 2.0**-23).to(lane.device), Settings(top_k=37))
    check(lane, (-1.0 - steps * 2.0**-24).to(lane.device), Settings(top_p=0.3721))


def _all_equal(lane: Lane) -> None:
    flat = torch.zeros(1, 1, 600, device=lane.device, dtype=lane.dtype)
    made = check(lane, flat, Settings(temperature=0.0))
    assert (made.tokens == 0).all()
    made = check(lane, flat, Settings(top_p=0.5001))  # 301 of them
    assert (made.lse - torch.tensor(301.0).log()).abs().max() < 1e-5
    assert made.tokens.max() < 301
    check(lane, flat, Settings(top_k=3, min_p=1.0))


def _masks(lane: Lane) -> None:
    """Masks of every broadcast shape, with a row that nothing may stand in."""
    logits = random_logits(2, 2, 130).to(lane.device, lane.dtype)
    allowed = (random_logits(2, 2, 130, 1) > 0).to(lane.device)
    allowed[1, 1] = False
    allowed[0, 1] = torch.arange(130, device=lane.device) == 129
    settings = Settings(temperature=1.2, top_k=30, top_p=0.8, min_p=0.01)
    for mask in (allowed[1:], allowed[:, :1], allowed.transpose(0, 1).clone()[:1, :1]):
        check(lane, logits, PLAIN, mask=mask)
    made = check(lane, logits[:, 1:], settings, mask=allowed[:, 1:])
    assert made.peak[1, 0] == NEVER and made.lse[1, 0] == NEVER and made.tokens[0, 0] == 129
    greedy = check(lane, logits, Settings(temperature=0.0), mask=allowed)
    assert greedy.peak[1, 1].isnan() and (greedy.peak[0] == 0).all()
    check(lane, logits, PLAIN, mask=allowed[..., :1].expand(-1, -1, 130))


def _invalid_logits(settings: Settings, lane: Lane) -> None:
    """NaN and infinity in single slots show in those slots' peaks alone."""
    logits = random_logits(1, 5, 520).to(lane.device, lane.dtype)
    logits[0, 0, 519] = float("nan")
    logits[0, 1, 3] = -torch.tensor(float("nan"))
    logits[0, 2, 5] = float("inf")
    logits[0, 3] = NEVER
    made = check(lane, logits, settings)
    assert made.peak.isfinite().tolist() == [[False] * 4 + [True]]


def _forced(lane: Lane) -> None:
    logits = random_logits(2, 2, 70).to(lane.device, lane.dtype)
    logits[1] = float("nan")
    forced = torch.tensor([[-1, 69], [0, -1]], device=lane.device)
    for settings in (Settings(top_k=5), Settings(temperature=0.0)):
        made = check(lane, logits, settings, forced=forced)
        assert made.tokens[0, 1] == 69 and made.tokens[1, 0] == 0
        assert made.peak[0, 1] == 0 and made.peak[1, 1].isnan()


def _splits(settings: Settings, n_values: int, lane: Lane) -> None:
    """Rows of several programs, the same maximum in each or all mass in the last."""
    logits = random_logits(1, 1, n_values).to(lane.device, lane.dtype)
    logits[..., ::1500] = 5.0
    if settings.top_k is None:
        logits[..., 4096:] += 30.0  # the first program's scores weigh nothing
    check(lane, logits, settings)


def _long(settings: Settings, lane: Lane) -> None:
    branches = 2 if settings.scale != 1 else 1
    check(
        lane,
        random_logits(4 * branches, 8, 262_145).to(lane.device, lane.dtype) * 2,
        settings,
        branches,
    )


_TWO = (torch.float32, torch.bfloat16)  # bfloat16 on GPUs alone
_BITS = ("triton",)  # of whom thresholds between equal scores, and NaN, are asked
_LIMITS = {
    "top-k 1": Settings(top_k=1),
    "top-k above all": Settings(top_k=101),
    "top-k of all but one": Settings(top_k=99),
    "top-p tiny": Settings(top_p=1e-9),
    "top-p almost 1": Settings(top_p=0.9999),
    "min-p 1": Settings(min_p=1.0),
    "min-p": Settings(min_p=0.1, temperature=1.5),
    "greedy": Settings(temperature=0.0, top_k=3, top_p=0.5),
    "cold": Settings(temperature=0.01, top_p=0.9),
}
_TIED = {
    "top-k": Settings(top_k=200),
    "top-p": Settings(top_p=0.2153),
    "both": Settings(top_k=400, top_p=0.8731),
}
_SPLITS = {
    "4095 tokens": (PLAIN, 4095),
    "4096 tokens": (PLAIN, 4096),
    "4097 tokens": (PLAIN, 4097),
    "splits, greedy": (Settings(temperature=0.0), 9000),
    "splits, top-k": (Settings(top_k=4), 4097),
    "splits, top-p": (Settings(top_p=0.3), 4500),
}
_INVALID = {
    "plain": PLAIN,
    "top-k": Settings(top_k=9),
    "greedy": Settings(temperature=0.0),
}
CASES = [Case(f"{n} tokens", partial(_size, n, PLAIN)) for n in (1, 2, 63, 511, 512, 513, 1023)]
CASES += [Case(f"{n} tokens, all filters", partial(_size, n, EVERYTHING), _TWO) for n in (1, 513)]
CASES += [Case(name, partial(_size, 100, settings), ONCE) for name, settings in _LIMITS.items()]
CASES += [
    Case("same tokens", _same_tokens, ONCE, versions=_BITS),
    Case("three branches", _three_branches),
    Case("strides", _strides, _TWO),
    Case("all equal", _all_equal, ONCE),
    Case("masks", _masks, ONCE),
    Case("neighbours", _neighbours, ONCE, versions=_BITS),
    Case("forced", _forced, _TWO, versions=_BITS),
]
CASES += [
    Case(f"ties, {k}", partial(_ties, s, 521), ONCE, versions=_BITS) for k, s in _TIED.items()
]
CASES += [
    Case(f"invalid logits, {name}", partial(_invalid_logits, settings), ONCE, versions=_BITS)
    for name, settings in _INVALID.items()
]
CASES += [Case(name, partial(_splits, *given), ONCE) for name, given in _SPLITS.items()]
CASES += sample_path_cases.CASES
CASES += [
    Case(f"long rows {number}", partial(_long, settings), large=True)
    for number, settings in enumerate((PLAIN, Settings(top_p=0.9), EVERYTHING))
]
