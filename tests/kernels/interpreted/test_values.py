"""Every kernel's cases through Triton's interpreter, in a process of their own.

The interpreter has to be chosen before triton is imported, and a kernel that reads out of bounds
takes the whole process down.
"""

from __future__ import annotations

import os

import pytest
import torch

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1 from the start; scripts/test.sh runs it in its own process",
)

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.case import all_cases
    from tests.kernels.gpu_cases import find_fault

    RUNS = [
        pytest.param(case, dtype, id=f"{kernel}: {case.name}, {str(dtype).removeprefix('torch.')}")
        for kernel, case in all_cases()
        for dtype in case.dtypes
        if dtype != torch.bfloat16 and not case.large
    ]
else:
    RUNS = []


@pytest.mark.parametrize(("case", "dtype"), RUNS)
def test_triton_equals_specification(case, dtype) -> None:  # type: ignore[no-untyped-def]
    assert find_fault(case, torch.device("cpu"), dtype) == ""
