"""Every configuration of every kernel compiled for GPUs that are not there: it builds, spills
nothing and keeps to its registers.
"""

from __future__ import annotations

import os
from importlib import import_module

import pytest

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("MMACCEL_COMPILE") != "1",
        reason="compiling takes a minute; scripts/test.sh runs it with MMACCEL_COMPILE=1",
    )
]

if os.environ.get("MMACCEL_COMPILE") == "1":
    from mmaccel.kernels.dispatch import KERNELS
    from tests.kernels.compiler import ARCHITECTURES, Compiled, compile_build

    BUILDS = [
        pytest.param(build, architecture, id=f"{kernel} {number} {architecture}")
        for kernel in KERNELS
        for number, build in enumerate(import_module(f"mmaccel.kernels.{kernel}_triton").builds())
        for architecture in ARCHITECTURES
    ]
else:
    BUILDS = []


@pytest.mark.parametrize(("build", "architecture"), BUILDS)
def test_builds_without_spills(build, architecture) -> None:  # type: ignore[no-untyped-def]
    made: Compiled = compile_build(build, architecture)
    assert made.spills == 0
    assert 0 < made.registers <= (build.registers if made.is_nvidia else 512)
