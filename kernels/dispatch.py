"""Dispatch: whether a kernel runs as its specification in torch, in Triton, or in numpy.

A specification is an ordinary function in `kernels/x.py`. Its Triton version has the same name and
signature in `kernels/x_triton.py`, next to a table `TAKES` of the tensors that it takes; its numpy
version, for few rows on a CPU, in `kernels/x_numpy.py`: a run decides once whether its steps take
those (`Backend`).

MMACCEL_KERNELS: `auto` takes Triton wherever it can run, and numpy where a run may; `torch` the
specifications alone; `triton` always Triton, and raises where it cannot run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from mmaccel.errors import MissingBackendError, OptionError
from mmaccel.kernels.gpu_obstacle import find_gpu_obstacle

VARIABLE = "MMACCEL_KERNELS"
MODES = ("auto", "torch", "triton")
OLDEST_TRITON = (3, 6)
KERNELS = {  # kernel -> its public function, both in kernels/<kernel>.py
    "noise": "uniforms",
    "window_attention": "window_attention",
    "pack_group": "pack_group",
    "packed_attention": "packed_attention",
    "column_mass": "column_mass",
    "block_scores": "block_scores",
    "choose_blocks": "choose_blocks",
    "compact": "compact",
    "unmask": "unmask",
    "sample": "sample_frozen",
    "couple": "couple",
    "coarse_rounds": "coarse_rounds",
    "add_norm": "add_norm",
    "rope_write": "rope_write",
    "gated_act": "gated_act",
    "row_product": "row_product",
    "window_inputs": "window_inputs",
    "accept_prefix": "accept_prefix",
}

NUMPY = {  # kernel -> its functions that have a version in kernels/<kernel>_numpy.py
    "accept_prefix": ("accept_prefix", "count_pass"),
    "acceptance": ("is_kept", "redraw", "verify", "follow"),
    "coarse_rounds": ("coarse_rounds",),
    "sample": ("argmax",),
    "window_inputs": ("count_new_drafts",),
}
# skip what a slot does not need: faster in numpy for any number of rows
_ANY_ROWS = ("coarse_rounds",)
_FEW_ROWS = 64  # with more, operations over the whole batch take less than rows one by one

P = ParamSpec("P")
T = TypeVar("T")


class Choice(NamedTuple):
    """Which backend runs, "torch" or "triton", and why."""

    backend: str
    reason: str


def mode() -> str:
    """The value of MMACCEL_KERNELS, `auto` where it is not set."""
    value = os.environ.get(VARIABLE) or "auto"
    if value not in MODES:
        raise OptionError(
            f"{VARIABLE}: expected one of {', '.join(MODES)}, received {value!r}; unset it"
        )
    return value


@cache
def find_obstacle(device_type: str) -> str | None:
    """Why Triton kernels cannot run on a kind of device; None if they can."""
    try:
        triton = import_module("triton")
    except ImportError as error:
        return f"triton does not import ({error}); pip install triton"
    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"triton {triton.__version__} is older than {oldest}; pip install 'triton>={oldest}'"
    if is_interpreted():
        return None
    if device_type != "cuda":
        return f"Triton kernels run on GPUs, and the tensors are on {device_type}"
    return find_gpu_obstacle()


def is_interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, statement by statement (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def choose(device_type: str) -> Choice:
    """Which backend runs kernels on a kind of device; a call's arguments may forbid it."""
    if mode() == "torch":
        return Choice("torch", f"{VARIABLE}=torch")
    obstacle = find_obstacle(device_type)
    if obstacle is not None:
        return Choice("torch", obstacle)
    return Choice(
        "triton", "interpreted" if is_interpreted() else f"the tensors are on {device_type}"
    )


def decide(specification: Callable[..., Any], *args: Any, **options: Any) -> Choice:
    """Which backend `run` would take for these arguments."""
    choice = choose(_device_type(args, options))
    if choice.backend == "torch":
        return choice
    is_bfloat16 = any(tensor.dtype == torch.bfloat16 for tensor in _tensors(args, options))
    if is_bfloat16 and is_interpreted():
        return Choice("torch", "bfloat16, which Triton's interpreter computes wrongly")
    obstacle = refuse(specification, args, options)
    return choice if obstacle is None else Choice("torch", obstacle)


def run(specification: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call a specification, a public function of `kernels/x.py`, or its Triton version. At least
    one of its arguments is a tensor.

    Raises:
        MissingBackendError: MMACCEL_KERNELS=triton, and the Triton kernel cannot run.
    """
    choice = decide(specification, *args, **options)
    if choice.backend == "triton":
        version: Callable[P, T] = getattr(_triton_module(specification), specification.__name__)
        with _device_of(args, options):
            return version(*args, **options)
    if mode() == "triton":
        raise MissingBackendError(
            f"{VARIABLE}=triton: expected {specification.__name__} to run as a Triton kernel, "
            f"received a call it cannot take: {choice.reason}; or set {VARIABLE}=auto"
        )
    return specification(*args, **options)


class Backend:
    """How a run's operations are carried out; a captured step may not read its tensors back."""

    def __init__(self, device_type: str, rows: int, *, reads_back: bool) -> None:
        is_on_host = device_type == "cpu" and reads_back and mode() == "auto"
        self._device_type = device_type
        self._is_numpy = is_on_host and not uses_triton(device_type)
        self._has_few_rows = self._is_numpy and rows <= _FEW_ROWS
        self._versions: dict[Any, Any] = {}  # by specification

    def run(self, specification: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call a specification, its numpy version or, as the module's `run`, its Triton version."""
        version: Callable[P, T] | None = self._versions.get(specification)
        if version is None:
            version = self._versions[specification] = self._find_version(specification)
        return version(*args, **options)

    def choose(self, on_any_device: T, on_host: T) -> T:
        """The second of two things that do the same, where the run's few rows are read on a CPU."""
        return on_host if self._has_few_rows else on_any_device

    def _find_version(self, specification: Callable[..., Any]) -> Callable[..., Any]:
        kernel = specification.__module__.rpartition(".")[2]
        name = specification.__name__
        is_worth_it = self._has_few_rows or kernel in _ANY_ROWS
        if self._is_numpy and is_worth_it and name in NUMPY.get(kernel, ()):
            module = import_module(f"{specification.__module__}_numpy")
            version: Callable[..., Any] = getattr(module, name)
            return version
        if KERNELS.get(kernel) == name and uses_triton(self._device_type):
            return partial(run, specification)
        return specification


def check(device_type: str) -> None:
    """Raise early what every kernel call on a kind of device would raise: under
    MMACCEL_KERNELS=triton MissingBackendError where no Triton kernel can run.
    """
    if mode() == "triton" and (obstacle := find_obstacle(device_type)) is not None:
        raise MissingBackendError(
            f"{VARIABLE}=triton: expected a device that Triton kernels run on, received "
            f"{device_type}: {obstacle}; or set {VARIABLE}=auto"
        )


def uses_triton(device_type: str) -> bool:
    """Whether `run` takes, or under MMACCEL_KERNELS=triton demands, Triton versions there."""
    return mode() == "triton" or choose(device_type).backend == "triton"


def _tensors(args: tuple[Any, ...], options: dict[str, Any]) -> list[Tensor]:
    return [value for value in (*args, *options.values()) if isinstance(value, Tensor)]


def _device_type(args: tuple[Any, ...], options: dict[str, Any]) -> str:
    tensors = _tensors(args, options)
    return tensors[0].device.type if tensors else torch.get_default_device().type


def _device_of(args: tuple[Any, ...], options: dict[str, Any]) -> AbstractContextManager[Any]:
    """Makes the tensors' GPU the current one, because Triton launches on the current GPU."""
    tensors = _tensors(args, options)
    if not tensors or tensors[0].device.type != "cuda":
        return nullcontext()
    return torch.cuda.device(tensors[0].device)


@cache
def _triton_module(specification: Callable[..., Any]) -> ModuleType:
    return import_module(f"{specification.__module__}_triton")


@cache
def _names(specification: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(signature(specification).parameters)


def refuse(
    specification: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> str | None:
    """Why the Triton version cannot take such arguments; None if it can."""
    arguments = dict(zip(_names(specification), args)) | options
    for path, takes in getattr(_triton_module(specification), "TAKES", {}).items():
        name, *inner = path.split(".")
        value = arguments.get(name)
        for attribute in inner:
            value = None if value is None else getattr(value, attribute)
        reason = None if value is None else takes.refuse(path, value, arguments.get(takes.like))
        if reason is not None:
            return str(reason)
    return None
