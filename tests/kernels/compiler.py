"""Compiling a kernel for a GPU that need not be there, and reading what became of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mmaccel.kernels.build import Build

ARCHITECTURES = ("sm_80", "sm_90", "gfx942")


class Compiled(NamedTuple):
    """Registers a thread, bytes it spills to memory, and whose GPU it is for."""

    registers: int
    spills: int
    is_nvidia: bool


def compile_build(build: Build, architecture: str) -> Compiled:
    """Compile for `sm_<n>` or `gfx<n>`; raises where the compiler refuses."""
    kernel = build.kernel
    names = list(kernel.arg_names)
    signature = {name: build.signature[name] for name in names}
    constants = {(names.index(name),): value for name, value in build.constants.items()}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in build.divisible}
    source = ASTSource(kernel, signature, constants, attributes)
    nvidia = architecture.startswith("sm_")
    target = (
        GPUTarget("cuda", int(architecture[3:]), 32)
        if nvidia
        else GPUTarget("hip", architecture, 64)
    )
    options = {
        "num_warps": build.warps,
        "num_stages": build.stages,
        "enable_fp_fusion": build.fp_fusion,
    }
    made = triton.compile(source, target=target, options=options)
    return _read_cubin(made.asm["cubin"]) if nvidia else _read_amd(made.asm["amdgcn"])


def _read_cubin(cubin: bytes) -> Compiled:
    """What triton's own assembler made; which one that is differs between versions."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.findall(r"(REG|STACK|LOCAL):(\d+)", said)
    most = {name: max(int(n) for key, n in usage if key == name) for name, _ in usage}
    # no kernel has arrays or calls of its own, so that a stack holds what was spilled
    return Compiled(most["REG"], most["STACK"] + most["LOCAL"], True)


def _read_amd(assembly: str) -> Compiled:
    registers = max(map(int, re.findall(r"\.vgpr_count:\s+(\d+)", assembly)))
    # scalar registers are spilled to lanes of a vector register, which is counted above
    memory = r"\.(?:vgpr_spill_count|private_segment_fixed_size):\s+(\d+)"
    spilled = sum(map(int, re.findall(memory, assembly)))
    return Compiled(registers, spilled, False)
