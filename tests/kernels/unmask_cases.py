"""Canvas statistics: the specification's tokens, probabilities, entropies and gaps.

Both versions get the same float32 logits, so no dtype loosens a tolerance: probabilities agree to
`RELATIVE` (sums of exponentials in another order), entropies to `RELATIVE` of a nat and of
themselves. Tokens are equal, at a temperature wherever the two best noisy scores lie further apart
than `SLACK`, since the noise's logarithms may round differently.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mmaccel.kernels import noise
from mmaccel.kernels.unmask import Unmasked, unmask
from tests.kernels.case import ONCE, Case, Lane, poison

RELATIVE = 2e-5
SLACK = 1e-4
_NONE = float("-inf")


def _arguments(logits: Tensor, masked: Tensor, temperature: float) -> tuple[object, ...]:
    batch, n_positions = masked.shape
    device = logits.device
    slots = torch.arange(batch * n_positions, device=device).view(batch, n_positions) * 7 + 3
    seeds = torch.tensor([5, -1, 2**40], device=device).repeat(batch)[:batch]
    items = torch.arange(batch, device=device) + 2
    return logits, masked, temperature, seeds, items, slots, torch.tensor(9, device=device)


def _compare(lane: Lane, logits: Tensor, masked: Tensor, temperature: float) -> Unmasked:
    args = _arguments(logits, masked, temperature)
    found: Unmasked = lane.call(unmask, *args)
    expected = unmask(*args)  # type: ignore[arg-type]
    same = found.tokens == expected.tokens
    if temperature == 0:
        lane.expect("tokens of unmask", found.tokens, expected.tokens)
    else:
        _check_draws(logits, same, found.tokens, args)
    tolerances = {"confidence": (RELATIVE, 1e-30), "peak": (RELATIVE, 1e-30)}
    tolerances |= {"entropy": (RELATIVE, RELATIVE), "gap": (0.0, RELATIVE)}
    for name, (rtol, atol) in tolerances.items():
        rows = same if name == "confidence" else torch.ones_like(same)  # the token's own
        received, wanted = (getattr(made, name)[rows] for made in (found, expected))
        lane.expect(f"{name} of unmask", received, wanted, rtol=rtol, atol=atol)
    return found


def _check_draws(logits: Tensor, same: Tensor, tokens: Tensor, args: tuple[object, ...]) -> None:
    """Where tokens differ, the other one's noisy score is the best one's within SLACK."""
    _, _, temperature, seeds, items, slots, purpose = args
    uniforms = noise.uniforms(seeds, items, slots, logits.shape[-1], purpose)  # type: ignore[arg-type]
    noisy = logits.float() + temperature * noise.to_gumbel(uniforms)  # type: ignore[operator]
    reached = noisy.gather(-1, tokens.clamp_min(0)[..., None])[..., 0]
    assert bool((same | (reached >= noisy.amax(-1) - SLACK)).all())


def _random(shape: tuple[int, ...], spread: float = 4.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * spread


def _sizes(n_values: int, temperature: float, lane: Lane) -> None:
    logits = _random((2, 3, n_values)).to(lane.device, lane.dtype)
    masked = torch.tensor([[True, False, True], [True, True, True]], device=lane.device)
    found = _compare(lane, logits, masked, temperature)
    assert found.tokens.shape == (2, 3) and found.tokens.dtype == torch.int64
    assert bool(((found.tokens >= 0) == masked).all()) and int(found.tokens.max()) < n_values


def _closed(lane: Lane) -> None:
    """No position is open, or those that are have no finite logit; the closed ones hold NaN."""
    logits = poison((2, 5, 100), lane.dtype, lane.device)
    masked = torch.zeros(2, 5, dtype=torch.bool, device=lane.device)
    masked[1, 2] = True
    logits[1, 2] = _NONE
    for temperature in (0.0, 1.0):
        found = _compare(lane, logits, masked, temperature)
        assert bool((found.tokens == -1).all() and (found.entropy == -_NONE).all())
        for measured in (found.confidence, found.gap, found.peak):
            assert bool((measured == _NONE).all())


def _ties(lane: Lane) -> None:
    """The largest logit stands there twice: in a block, in two blocks, in two parts; once alone."""
    logits = torch.zeros(1, 5, 8192 + 1030, dtype=lane.dtype, device=lane.device)
    places = ((3, 900), (17, 1024), (8191, 8192), (1023, 9221), (5000,))
    for position, ids in enumerate(places):
        logits[0, position, list(ids)] = 12.0
    found = _compare(lane, logits, torch.ones(1, 5, dtype=torch.bool, device=lane.device), 0.0)
    assert found.tokens.tolist() == [[3, 17, 8191, 1023, 5000]]
    assert bool((found.gap[0, :4] == 0).all()) and float(found.gap[0, 4]) > 0.5
    level = torch.zeros(1, 1, 1025, dtype=lane.dtype, device=lane.device)  # all the same
    found = _compare(lane, level, torch.ones(1, 1, dtype=torch.bool, device=lane.device), 0.0)
    assert int(found.tokens) == 0 and float(found.gap) == 0


def _few(temperature: float, lane: Lane) -> None:
    """One finite logit in a row, in another nothing finite in the first part, then large ones."""
    logits = torch.full((1, 4, 9000), _NONE, dtype=lane.dtype, device=lane.device)
    logits[0, 0, 8500] = -7.0
    logits[0, 1, 8300:8310] = _random((10,)).to(lane.device, lane.dtype)
    logits[0, 2, ::3] = (_random((3000,)) - 300).to(lane.device, lane.dtype)
    shifted = _random((9000,)) + 600  # exponents overflow unless shifted
    logits[0, 3, :] = shifted.to(lane.device, lane.dtype)
    found = _compare(
        lane, logits, torch.ones(1, 4, dtype=torch.bool, device=lane.device), temperature
    )
    assert int(found.tokens[0, 0]) == 8500 and float(found.entropy[0, 0]) == 0
    assert float(found.confidence[0, 0]) == float(found.gap[0, 0]) == 1
    assert 8300 <= int(found.tokens[0, 1]) < 8310 and int(found.tokens[0, 2]) % 3 == 0


def _rising(lane: Lane) -> None:
    """The maximum rises in every block and part, or falls: both sums are rescaled each time."""
    steps = torch.arange(10_000) // 1000
    logits = torch.stack([steps.float(), -steps.float()])[None] * 2
    logits = (logits + _random((1, 2, 10_000), 0.1)).to(lane.device, lane.dtype)
    _compare(lane, logits, torch.ones(1, 2, dtype=torch.bool, device=lane.device), 0.0)


def _strides(lane: Lane) -> None:
    """The last positions of a longer canvas, rows and positions swapped, every second of them."""
    whole = _random((3, 4, 70)).to(lane.device, lane.dtype)
    for logits in (whole[:, -2:, 5:60], whole.transpose(0, 1), whole[::2, ::2]):
        masked = torch.ones(logits.shape[1::-1], dtype=torch.bool, device=lane.device).t()
        assert not logits.is_contiguous()
        _compare(lane, logits, masked, 0.0)
        _compare(lane, logits, masked, 0.7)


def _nothing(lane: Lane) -> None:
    masked = torch.ones(0, 3, dtype=torch.bool, device=lane.device)
    lane.compare(unmask, *_arguments(torch.zeros(0, 3, 8, device=lane.device), masked, 1.0))


def _large(temperature: float, lane: Lane) -> None:
    """32 open positions of 128 over a language model's vocabulary; more than 64 parts' worth."""
    masked = torch.arange(128, device=lane.device).view(2, 64) % 4 == 0
    _compare(lane, _random((2, 64, 126_465)).to(lane.device, lane.dtype), masked, temperature)
    few = torch.ones(1, 2, dtype=torch.bool, device=lane.device)
    _compare(lane, _random((1, 2, 530_001)).to(lane.device, lane.dtype), few, temperature)


CASES = [Case(f"{n} values, greedy", partial(_sizes, n, 0.0)) for n in (1, 2, 63, 1023, 1024, 1025)]
CASES += [Case(f"{n} values, drawn", partial(_sizes, n, 0.8)) for n in (1, 63, 1023, 1025)]
CASES += [
    Case("parts of 8191 values", partial(_sizes, 8191, 1.3), ONCE),
    Case("parts of 8193 values, flat", partial(_sizes, 8193, 9.0), ONCE),
    Case("closed", _closed),
    Case("ties", _ties),
    Case("few finite, greedy", partial(_few, 0.0)),
    Case("few finite, drawn", partial(_few, 1.0), ONCE),
    Case("rising", _rising, ONCE),
    Case("strides", _strides),
    Case("nothing", _nothing, ONCE),
    Case("large, greedy", partial(_large, 0.0), large=True),
    Case("large, drawn", partial(_large, 1.0), large=True),
]
