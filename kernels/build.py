"""Build: one configuration in which a Triton kernel is compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Build:
    """One way to compile a kernel; each `x_triton.py` lists all of its own in `builds()`.

    Attributes:
        kernel: the function that `triton.jit` decorates.
        signature: type of every argument by name, such as `*bf16`, `i32`, or `constexpr`.
        constants: values of the constexpr arguments.
        warps: num_warps.
        stages: num_stages.
        registers: most registers a thread may take on NVIDIA GPUs.
        divisible: names of the arguments that are multiples of 16 (pointers, as a rule).
        fp_fusion: enable_fp_fusion; whether a product and a sum may be rounded once.
        only: the architecture that it is for; empty: all.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 2
    registers: int = 128
    divisible: tuple[str, ...] = ()
    fp_fusion: bool = True
    only: str = ""

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
        """A build whose pointers are multiples of 16.

        Args:
            kinds: types of the arguments, by name.
            aligned: further arguments that are such multiples.
            other: the type of those that `kinds` does not name.
        """
        signature = {
            name: "constexpr" if name in constants else kinds.get(name, other)
            for name in kernel.arg_names
        }
        pointers = [name for name, kind in signature.items() if kind.startswith("*")]
        divisible = (*pointers, *aligned)
        return cls(kernel, signature, constants, warps, stages, registers, divisible, fp_fusion)
