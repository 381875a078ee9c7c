"""One table of operations: cases that make arguments, and lanes in which a version takes them.

A version of an operation is compared with its specification, `mmaccel.kernels.<kernel>`, on copies
of the same arguments: Triton (interpreted, or compiled on a GPU), numpy, and plain loops, which
share no code with the others (`tests/kernels/plain.py`).

Nothing here or in the `*_cases.py` needs pytest: `scripts/gpu_check.py` runs the same cases on a
GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mmaccel.kernels.dispatch import KERNELS, refuse
from tests.kernels import plain

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ONCE = (torch.float32,)  # of a case whose arguments do not depend on the dtype
VERSIONS = ("triton", "numpy", "plain")


@dataclass(frozen=True)
class Lane:
    """The version that is compared, and on what tensors.

    Attributes:
        version: "triton", "numpy" or "plain".
        device, dtype: of the arguments.
    """

    version: str
    device: torch.device
    dtype: torch.dtype

    @property
    def rounding(self) -> float:
        """How far results of size 1 may differ that were rounded once or twice to the dtype."""
        bits = {torch.float64: 1e-9, torch.float32: 2e-6, torch.float16: 2e-3}
        return bits.get(self.dtype, 1.6e-2)

    def normal(self, *shape: int, seed: int = 1, mean: float = 0.0, spread: float = 1.0) -> Tensor:
        """Normal numbers, the same in every lane but for the rounding to its dtype."""
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return (drawn * spread + mean).to(self.device, self.dtype)

    def put(self, value: Any) -> Any:
        """A value with its tensors on the lane's device."""
        return _map(value, lambda tensor: tensor.to(self.device))

    def find(self, specification: Callable[..., Any]) -> Callable[..., Any]:
        """The function of the lane's version."""
        name = specification.__name__
        if self.version == "plain":
            return getattr(plain, name)
        return getattr(import_module(f"{specification.__module__}_{self.version}"), name)

    def call(self, specification: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What the version makes of these arguments, which Triton must not refuse."""
        if self.version == "triton":
            refusal = refuse(specification, args, options)
            assert refusal is None, f"{specification.__name__}: refused: {refusal}"
        return self.find(specification)(*args, **options)

    def compare(
        self,
        specification: Callable[..., Any],
        *args: Any,
        tolerance: float | Mapping[str, float] = 0.0,
        **options: Any,
    ) -> Any:
        """Run both versions on copies of the arguments: what they return and write is equal.

        Whole memories of arguments are compared, so that a write beside a view is seen.

        Args:
            tolerance: absolute and relative; by the names of results and arguments, 0 elsewhere.

        Returns:
            What the version returns.
        """
        ours, theirs = _map((args, options), _copy), _map((args, options), _copy)
        made = self.call(specification, *ours[0], **ours[1])
        expected = specification(*theirs[0], **theirs[1])
        signature = inspect.signature(specification)
        given = signature.bind(*ours[0], **ours[1]).arguments
        wanted_given = signature.bind(*theirs[0], **theirs[1]).arguments
        where = f"{self.version} version of {specification.__name__}, {self.dtype}"
        for name, received, wanted in _pairs("result", made, expected, where):
            _check(received, wanted, _limit(tolerance, name), f"{where}: {name}")
        for name, received, wanted in _pairs("", given, wanted_given, where):
            memories = _memory(received), _memory(wanted)
            _check(*memories, _limit(tolerance, name), f"{where}: memory of {name}")
        return made

    def expect(
        self, what: str, received: Tensor, wanted: Tensor, *, rtol: float = 0.0, atol: float = 0.0
    ) -> None:
        """Tensors that are equal up to a tolerance; a failure names the version and the tensor."""
        torch.testing.assert_close(
            received, wanted, rtol=rtol, atol=atol, equal_nan=True,
            msg=lambda text: f"{self.version} version, {self.dtype}: {what}: {text}",
        )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A named check; `run(lane)` raises AssertionError if the lane's version is another.

    Attributes:
        name: unique within its kernel.
        run: the check.
        dtypes: what it is run in; the interpreter is wrong in bfloat16, so that is left to GPUs.
        large: too many programs for the interpreter; run on GPUs alone.
        versions: whose check it is.
    """

    name: str
    run: Callable[[Lane], None]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    large: bool = False
    versions: tuple[str, ...] = VERSIONS


def cases_of(kernel: str) -> list[Case]:
    """All cases of a kernel."""
    found: list[Case] = import_module(f"tests.kernels.{kernel}_cases").CASES
    return found


def has_version(kernel: str, version: str) -> bool:
    """Whether there is such a version of a kernel's public function."""
    if version == "plain":
        return hasattr(plain, KERNELS[kernel])
    name = f"mmaccel.kernels.{kernel}_{version}"
    if find_spec(name) is None:
        return False
    return version == "triton" or hasattr(import_module(name), KERNELS[kernel])


def lanes_of(case: Case, version: str, device: torch.device) -> Iterator[Lane]:
    """The lanes of a version in which a case runs on a device.

    Plain loops are compared in float64 where the others are in float32.
    """
    is_gpu = device.type == "cuda"
    if version not in case.versions or (case.large and not is_gpu):
        return
    for dtype in case.dtypes:
        is_wide = version == "plain" and dtype == torch.float32 and case.dtypes != ONCE
        if is_gpu or version != "triton" or dtype != torch.bfloat16:
            yield Lane(version, device, torch.float64 if is_wide else dtype)


def all_runs(version: str, device: torch.device) -> list[tuple[str, Case, Lane]]:
    """Every case of every kernel that has the version, in the order of `KERNELS`."""
    return [
        (f"{kernel}: {case.name}, {str(lane.dtype).removeprefix('torch.')}", case, lane)
        for kernel in KERNELS
        if has_version(kernel, version)
        for case in cases_of(kernel)
        for lane in lanes_of(case, version, device)
    ]


def poison(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of NaN, or of the lowest integer: what a kernel fails to write is seen."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)
    return torch.full(shape, torch.iinfo(dtype).min, dtype=dtype, device=device)


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A value whose tensors, in tuples, dictionaries and dataclasses too, are changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        parts = [_map(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, dict):
        return {key: _map(part, change) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: _map(getattr(value, f.name), change) for f in fields(value)}
        )
    return value


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor | None]]:
    """Tensors of a value by their paths, and places without one."""
    if value is None or isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors(f"{name}.{key}".lstrip("."), part)
    elif isinstance(value, tuple):
        names = getattr(value, "_fields", range(len(value)))
        for key, part in zip(names, value, strict=True):
            yield from _tensors(f"{name}.{key}", part)
    elif is_dataclass(value):
        for f in fields(value):
            yield from _tensors(f"{name}.{f.name}", getattr(value, f.name))


def _pairs(name: str, made: Any, expected: Any, where: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    ours, theirs = dict(_tensors(name, made)), dict(_tensors(name, expected))
    kinds = [{key for key, part in parts.items() if part is not None} for parts in (ours, theirs)]
    assert kinds[0] == kinds[1], f"{where}: returns {kinds[0]}, expected {kinds[1]}"
    for key, wanted in theirs.items():
        received = ours[key]
        if received is not None and wanted is not None:
            yield key, received, wanted


def _copy(tensor: Tensor) -> Tensor:
    """A tensor of the same strides in a copy of the whole memory."""
    memory = tensor.untyped_storage().clone()
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _memory(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    length = storage.nbytes() // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, 0, (length,), (1,)
    )


def _limit(tolerance: float | Mapping[str, float], name: str) -> float:
    return tolerance.get(name, 0.0) if isinstance(tolerance, Mapping) else tolerance


def _check(received: Tensor, wanted: Tensor, limit: float, where: str) -> None:
    torch.testing.assert_close(
        received, wanted, atol=limit, rtol=limit, equal_nan=True,
        msg=lambda text: f"{where}: {text}",
    )  # fmt: skip
