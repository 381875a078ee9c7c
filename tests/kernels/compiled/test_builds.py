"""Every configuration of every kernel compiled for GPUs that are not there: it builds, spills
nothing and keeps to its registers.
"""

from __future__ import annotations

import os
from importlib import import_module

import pytest

WANTED = os.environ.get("MMACCEL_COMPILE", "")  # "all", or architectures

pytestmark = [
    pytest.mark.skipif(
        not WANTED,
        reason="compiling takes a minute; scripts/test.sh runs it with MMACCEL_COMPILE=all",
    )
]

# A release's assembler may take fewer registers than it is given: bytes that it spills so.
KNOWN_SPILLS = {
    ("3.6", "accept_prefix 2 sm_80"): 8,
    ("3.9", "coarse_rounds 4 sm_80"): 8,
    ("3.9", "window_attention 24 sm_80"): 8,
    ("3.7", "window_attention 26 sm_90"): 16,
    ("3.9", "packed_attention 10 sm_80"): 8,
}
if WANTED:
    import triton

    from mmaccel.kernels.dispatch import KERNELS
    from tests.kernels.compiler import ARCHITECTURES, Compiled, compile_build

    BUILDS = [
        pytest.param(build, architecture, name, id=name)
        for kernel in KERNELS
        for number, build in enumerate(import_module(f"mmaccel.kernels.{kernel}_triton").builds())
        for architecture in (ARCHITECTURES if WANTED == "all" else WANTED.split())
        if build.only in ("", architecture)
        for name in [f"{kernel} {number} {architecture}"]
    ]
else:
    BUILDS = []


@pytest.mark.parametrize(("build", "architecture", "name"), BUILDS)
def test_builds_without_spills(build, architecture, name) -> None:  # type: ignore[no-untyped-def]
    made: Compiled = compile_build(build, architecture)
    release = ".".join(triton.__version__.split(".")[:2])
    assert made.spills == KNOWN_SPILLS.get((release, name), 0)
    most = build.registers if made.is_nvidia else 512
    assert 0 < made.registers <= most
