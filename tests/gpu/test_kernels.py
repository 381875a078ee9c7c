"""Every kernel's cases on a GPU, in every dtype and at every size."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no GPU; scripts/gpu_check.py says more"
)

if torch.cuda.is_available():
    from tests.kernels.case import all_cases
    from tests.kernels.gpu_cases import find_fault

    RUNS = [
        pytest.param(case, dtype, id=f"{kernel}: {case.name}, {str(dtype).removeprefix('torch.')}")
        for kernel, case in all_cases()
        for dtype in case.dtypes
    ]
else:
    RUNS = [pytest.param(None, None, id="none")]


@pytest.mark.parametrize(("case", "dtype"), RUNS)
def test_a_kernel_equals_its_reference(case, dtype) -> None:  # type: ignore[no-untyped-def]
    assert find_fault(case, torch.device("cuda"), dtype) == ""
