"""The ways a cut-off row takes through `sample`'s Triton twin: lists, a second read, or a search.

Rows of three programs, each way beside the others in one batch; how often logits are read is
counted, so that a row is known to have gone its way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmaccel.kernels import sample_triton
from mmaccel.kernels.sample import Sampled, Settings
from mmaccel.kernels.sample_traffic import Way, count_bytes, count_reads
from tests.kernels.case import Case
from tests.kernels.sample_check import check, random_logits

NEVER = float("-inf")
N_VALUES = 2 * 4096 + 77
EDGES = (5, 127, 128, 255, 256, 4095, 4096, 8191, N_VALUES - 1)  # of turns, splits and the row
_FEW = Settings(top_k=20)
_SHARE = Settings(top_p=0.9)
_BOTH = Settings(top_k=20, top_p=0.5, min_p=0.01, temperature=0.9)


def _glanced(n_values: int) -> Tensor:
    """The ids that a glance sees."""
    lane = torch.arange(512)
    return lane // 16 * max(n_values // 32, 16) + lane % 16


def _rows() -> dict[str, Tensor]:
    """Rows of all kinds; a few likely tokens stand at the edges of what programs read."""
    steep, flat = (random_logits(1, 1, N_VALUES, seed)[0, 0] for seed in (1, 2))
    steep = steep * 4
    steep[list(EDGES)] = 18.0 + torch.arange(9) / 8
    misled = flat.clone()
    misled[_glanced(N_VALUES)[::13]] += 20.0
    few = torch.full((N_VALUES,), NEVER)
    few[list(EDGES)] = flat[:9]
    tied = flat - 9.0
    tied[list(EDGES)] = 9.0
    return {
        "steep": steep, "flat": flat, "misled": misled, "few": few, "tied": tied,
        "same": torch.zeros(N_VALUES), "none": torch.full((N_VALUES,), NEVER),
    }  # fmt: skip


def _mixed(
    names: tuple[str, ...], settings: Settings, device: torch.device, dtype: torch.dtype
) -> None:
    """Rows of several ways in one batch; each alone has the same bits."""
    rows = _rows()
    logits = torch.stack([rows[name] for name in names])[None].to(device, dtype)
    made = check(logits, settings)
    slot = len(names) - 1
    again = _sample(logits[:, slot:], settings, slot)
    assert all(torch.equal(a[:, slot:], b) for a, b in zip(made, again))


def _sample(logits: Tensor, settings: Settings, slot: int = 0) -> Sampled:
    device = logits.device
    none = torch.zeros(logits.shape[0], dtype=torch.int64, device=device)
    slots = torch.arange(logits.shape[1], device=device)[None] * 2 + 2 * slot
    return sample_triton.sample_frozen(logits, 1, settings, None, none - 3, none, slots, none[0])


def _ties_far_apart(device: torch.device, dtype: torch.dtype) -> None:
    """Nine tokens tied in all programs of a row: the five of lowest ids reach a half."""
    logits = _rows()["tied"].expand(1, 3, -1).to(device, dtype)
    made = check(logits, Settings(top_p=0.5))
    assert (made.lse - 9 - math.log(5)).abs().max() < 1e-5
    assert set(made.tokens.flatten().tolist()) <= set(EDGES[:5])
    made = check(logits[:, :1], Settings(top_k=3))  # ties of top-k all stay
    assert abs(made.lse.item() - 9 - math.log(9)) < 1e-5


def _guided(device: torch.device, dtype: torch.dtype) -> None:
    """Three branches and a mask, rows and slots swapped in memory, a slice of a wider head."""
    wide = random_logits(2, 3, 4300, 6).to(device, dtype).transpose(0, 1)[..., 50:4250]
    mask = torch.arange(4200, device=device).view(1, 1, -1) % 3 > 0
    check(wide[:, :1], Settings(2.0, 1.5, 0.8, 30, 0.9, 0.001), 3, mask)
    check(wide[:2, 1:], Settings(1.5, top_p=0.7), 2, mask)


def _stale(device: torch.device, dtype: torch.dtype) -> None:
    """Whatever scratch holds before a call, results are the same bits."""
    rows = _rows()
    logits = torch.stack([rows[name] for name in ("steep", "misled", "same")])[None]
    logits = logits[..., :4097].to(device, dtype)
    allocate: Callable[..., Any] = sample_triton.allocate
    found = []
    for number in (0, 1, 7):

        def filled(*args: Any, number: int = number) -> Any:
            made = allocate(*args)
            for scratch in made:
                scratch.fill_(number)
            return made

        sample_triton.allocate = filled
        try:
            found.append(_sample(logits, _FEW))
        finally:
            sample_triton.allocate = allocate
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


@contextmanager
def _counted(logits: Tensor) -> Iterator[list[int]]:
    """Bytes that kernels load from `logits`, and that they store anywhere, in the interpreter."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    total = [0, 0]
    first = logits.data_ptr()
    last = first + logits.numel() * logits.element_size()

    def counted_load(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        inside = mask.data & (ptrs.data >= first) & (ptrs.data < last)
        total[0] += int(inside.sum()) * logits.element_size()
        return load(self, ptrs, mask, *others)

    def counted_store(self: Any, ptrs: Any, value: Any, mask: Any, *others: Any) -> Any:
        total[1] += int(mask.data.sum()) * value.data.itemsize
        return store(self, ptrs, value, mask, *others)

    InterpreterBuilder.create_masked_load = counted_load
    InterpreterBuilder.create_masked_store = counted_store
    try:
        yield total
    finally:
        InterpreterBuilder.create_masked_load = load
        InterpreterBuilder.create_masked_store = store


def _traffic(
    name: str, settings: Settings, way: Way, device: torch.device, dtype: torch.dtype
) -> None:
    """A row goes the way it should, and moves the bytes that `count_bytes` says."""
    if device.type != "cpu":
        return  # counted in the interpreter
    logits = _rows()[name][None, None].to(dtype)
    with _counted(logits) as total:
        _sample(logits, settings)
    size = logits.element_size()
    promised = count_bytes(N_VALUES, size, settings, way)
    assert total[0] == promised.logits, (total, promised)
    assert total[0] // (N_VALUES * size) == count_reads(N_VALUES, settings, way)
    pairs, rest = divmod(total[1] - promised.written, 8)
    limit = {"lists": 0.1, "second read": 0.2, "search": 1.0}[way] * N_VALUES
    assert rest == 0 and (0 < pairs < limit or settings == Settings()), (total, promised)
    assert total[1] == count_bytes(N_VALUES, size, settings, way, pairs).written


_ONCE = (torch.float32,)
_WAYS: tuple[tuple[str, Settings, Way], ...] = (
    ("steep", _FEW, "lists"),
    ("misled", _FEW, "second read"),
    ("same", _FEW, "search"),
    ("steep", _SHARE, "lists"),
    ("flat", _SHARE, "second read"),
    ("same", _SHARE, "search"),
    ("steep", _BOTH, "lists"),
    ("misled", _BOTH, "search"),
    ("steep", Settings(), "lists"),
)
CASES = [
    Case("ways of top-k", partial(_mixed, ("steep", "misled", "same", "few", "none"), _FEW), _ONCE),
    Case("ways of top-p", partial(_mixed, ("steep", "flat", "same", "few"), _SHARE), _ONCE),
    Case("ways of both", partial(_mixed, ("steep", "misled", "few"), _BOTH), _ONCE),
    Case("top-k of a tenth", partial(_mixed, ("flat",), Settings(top_k=829)), (torch.float16,)),
    Case("top-k 1 of long rows", partial(_mixed, ("flat", "tied"), Settings(top_k=1)), _ONCE),
    Case("top-p 1", partial(_mixed, ("flat",), Settings(top_p=1.0)), _ONCE),
    Case("top-p tiny of long rows", partial(_mixed, ("misled",), Settings(top_p=1e-7)), _ONCE),
    Case("ties far apart", _ties_far_apart, _ONCE),
    Case("guided long rows", _guided, _ONCE),
    Case("stale scratch", _stale, _ONCE),
]
CASES += [
    Case(f"traffic of {name}, {number}, {way}", partial(_traffic, name, settings, way), _ONCE)
    for number, (name, settings, way) in enumerate(_WAYS)
]
