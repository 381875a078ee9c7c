"""Build: one configuration in which a Triton kernel is compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Build:
    """One way to compile a kernel; each `x_triton.py` lists all of its own in `builds()`."""

    kernel: Any  # the function that `triton.jit` decorates
    signature: Mapping[str, str]  # type of every argument by name: `*bf16`, `i32`, `constexpr`
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 2
    registers: int = 128  # the most that a thread may take on NVIDIA GPUs
    divisible: tuple[str, ...] = ()  # arguments that are multiples of 16 (pointers, as a rule)
    fp_fusion: bool = True  # whether a product and a sum may be rounded once
    only: str = ""  # the architecture that it is for; empty: all

    @classmethod
    def of(
        cls,
        kernel: Any,
        kinds: Mapping[str, str],
        constants: Mapping[str, Any],
        warps: int,
        stages: int,
        registers: int,
        aligned: Iterable[str] = (),
        *,
        other: str = "i32",
        fp_fusion: bool = True,
    ) -> Build:
        """Pointers and `aligned` arguments are multiples of 16; unnamed ones are `other`."""
        signature = {
            name: "constexpr" if name in constants else kinds.get(name, other)
            for name in kernel.arg_names
        }
        pointers = [name for name, kind in signature.items() if kind.startswith("*")]
        divisible = (*pointers, *aligned)
        return cls(kernel, signature, constants, warps, stages, registers, divisible, fp_fusion)
