"""Passes of the fused decoder on a CPU as compiled code, where that is faster.

Compiling takes some ten seconds, and for some shapes never pays. So at the first pass of a shape in
a run, both ways take turns over the same input, and the faster one runs the shape's passes from
then on. `True` makes the trial at once; "auto" once passes of the kind have taken as long as
compiling may. A shape is a number of rows, and of tokens, up to the next power of two.

A function is compiled for a number of rows, and for one token of each or several; other numbers may
change. A prompt's first pass, and passes of some of a cache's rows, run as they are.

The logits differ from the fused decoder's in their last bits; the trial compares them.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from tempfile import TemporaryFile
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mmaccel.checks import show
from mmaccel.errors import UnsupportedModelError, describe
from mmaccel.kernels import dispatch
from mmaccel.kernels.device_errors import is_device_error
from mmaccel.pipelines.hosts.layers.store import WindowLayer
from mmaccel.pipelines.hosts.runner.trial import find_gain
from mmaccel.samplers.compare_logits import Tolerance, compare_logits
from mmaccel.samplers.run_lock import in_turn
from mmaccel.samplers.tuner import Tuner

UseCompile = Literal["auto"] | bool
Shape = tuple[int, int]  # rows, tokens of each: the next power of two
Kind = tuple[int, bool]  # rows, whether there are several tokens
Arguments = tuple[Any, ...]  # of a pass: a decoder, its input, tensors

_COMPILE_SECONDS = 20.0  # of passes of a kind, before "auto" compiles it
_TRIAL_SECONDS = 1.0  # of passes of a shape, before "auto" measures it where its kind is compiled
_ROUNDS = 8  # passes by each way in a trial, of which the first is not timed
_GAIN = 1.03  # by how much the compiled passes must be faster

logger = logging.getLogger("mmaccel")


@dataclass
class CompiledRun:
    """The passes of one run. All passes of a shape run in the same way."""

    mode: UseCompile
    is_captured: bool = False  # in CUDA graphs
    ran: bool = False  # whether a pass ran compiled
    chosen: dict[Shape, Callable[..., Tensor]] = field(default_factory=dict)


class CompiledPasses:
    """The passes of a decoder, of which `plain` is one, and what is known about compiling them."""

    def __init__(self, plain: Callable[..., Tensor]) -> None:
        self.plain = plain
        self.reasons: dict[Kind, str] = {}  # why passes of a kind are not compiled
        self.gains: dict[Shape, float] = {}  # seconds of a plain pass over those of a compiled one
        self._compiled: dict[Kind, Callable[..., Tensor]] = {}
        self.plain_passes = defaultdict[Shape, Tuner](lambda: Tuner((1,)))

    def run(self, run: CompiledRun, *args: Any) -> Tensor:
        """Run a pass over its input `[R, W, C]` and tensors; True raises where it cannot."""
        rows, width = args[1].shape[:2]
        shape = rows, 1 << (width - 1).bit_length()
        call = run.chosen.get(shape)
        if call is None:
            with _disable_current_modes():  # under which nothing is compiled
                call = run.chosen[shape] = self._choose(run.mode, shape, args)
        if call is self.plain:
            return self.plain_passes[shape].time(1, partial(call, *args))
        run.ran = True
        with _disable_current_modes():
            return call(*args)

    @in_turn
    def _choose(self, mode: UseCompile, shape: Shape, args: Arguments) -> Callable[..., Tensor]:
        """What runs the passes of a shape. Cost of a trial: compiling if need be, and 16 passes."""
        kind = _find_kind(shape)
        if shape not in self.gains and kind not in self.reasons:
            if kind in self._compiled:
                is_time = self.plain_passes[shape].total > _TRIAL_SECONDS
            else:
                timed = self.plain_passes.items()
                total = sum(each.total for other, each in timed if _find_kind(other) == kind)
                is_time = total > _COMPILE_SECONDS and not find_obstacle()
            if mode is True or is_time:
                self._try(shape, kind, args)
        if mode is True and kind in self.reasons:
            raise UnsupportedModelError(
                "compile=True: expected layers that torch.compile takes, received "
                f"{self.reasons[kind]}; set compile='auto'"
            )
        is_faster = self.gains.get(shape, 0.0) > _GAIN
        return self._compiled[kind] if is_faster else self.plain

    def _try(self, shape: Shape, kind: Kind, args: Arguments) -> None:
        compiled = self._compiled.get(kind)
        try:
            if compiled is None:
                compiled = _compile(self.plain)
                _mark(args[1:], several=kind[1])
            expected = self.plain(*args)
            received = compiled(*args)
        except Exception as error:
            if is_device_error(error):
                raise
            self.reasons[kind] = f"a pass that ends in a {describe(error)}"
            return
        difference = compare_logits(expected, received)
        if not difference.is_telling:  # rows that have ended may hold anything; another pass tells
            return
        dtype = expected.dtype
        is_single = dtype in (torch.float32, torch.float64)
        tolerance = Tolerance.strict(torch.float32) if is_single else Tolerance.of(dtype)
        if not difference.within(tolerance):
            self.reasons[kind] = f"compiled passes that are {difference}"
            return
        if kind not in self._compiled:
            logger.info("compiled passes of the fused decoder")
            self._compiled[kind] = _keep(compiled)
        ways = partial(self.plain, *args), partial(self._compiled[kind], *args)
        self.gains[shape] = find_gain([ways] * _ROUNDS, tolerance)


def takes(run: CompiledRun, hidden: Tensor, cache: Sequence[WindowLayer]) -> bool:
    """Whether a run may compile a pass: on a CPU, of all rows of a cache that has room."""
    if run.mode is False or hidden.device.type != "cpu" or dispatch.mode() == "triton":
        return False
    layout = cache[0].layout
    is_whole = layout.selected_rows is None and layout.pass_rows == layout.max_rows
    return is_whole and all(store.has_room for store in cache)


def _find_kind(shape: Shape) -> Kind:
    return shape[0], shape[1] > 1


def _compile(plain: Any) -> Callable[..., Tensor]:
    """Compile a copy: torch stops compiling a function's code after some models."""
    code = plain.__code__.replace()
    copy = FunctionType(
        code, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    compiled: Callable[..., Tensor] = torch.compile(copy, fullgraph=True, dynamic=False)
    return compiled


def _keep(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A compiled function that compiles no more: what it was not compiled for runs as it is."""

    def call(*args: Any) -> Tensor:
        with torch.compiler.set_stance("eager_on_recompile"):
            return compiled(*args)

    return call


def _mark(tensors: Sequence[Any], several: bool) -> None:
    """Tell torch which lengths of a pass's tensors may change: tokens, if several, and keys."""
    hidden, angles, masks, stores, index = tensors
    by_kind = masks.values() if isinstance(masks, dict) else [masks]
    axes = [(mask, 3) for mask in by_kind] + [(states, 0) for pair in stores for states in pair]
    if several:
        axes += [(hidden, 1), (index, 0), *((mask, 2) for mask in by_kind)]
        axes += [(turns, 0) for pair in angles.values() for turns in pair]
    for tensor, axis in axes:
        torch._dynamo.maybe_mark_dynamic(tensor, axis)


@cache
def find_obstacle() -> str:
    """Why passes on a CPU cannot be compiled here, and what helps; empty where they can. Cost: at
    the first call, one run of the compiler.
    """
    try:
        try:
            from torch._inductor.runtime.runtime_utils import cache_dir  # whose import makes it

            with TemporaryFile(dir=cache_dir()):
                pass
        except OSError as error:
            return (
                f"torch cannot write its compile cache ({error.strerror}: {show(error.filename)}); "
                "set TORCHINDUCTOR_CACHE_DIR to a folder that can be written"
            )
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except Exception as error:
        return f"torch finds no C++ compiler, but a {describe(error)}; install g++"
    return ""
