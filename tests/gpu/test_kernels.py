"""Every kernel's cases on a GPU, in every dtype and at every size."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no GPU; scripts/gpu_check.py says more"
)

if torch.cuda.is_available():
    from tests.kernels.case import all_runs

    RUNS = [pytest.param(*run[1:], id=run[0]) for run in all_runs("triton", torch.device("cuda"))]
else:
    RUNS = [pytest.param(None, None, id="none")]


@pytest.mark.parametrize(("case", "lane"), RUNS)
def test_a_kernel_equals_its_reference(case, lane) -> None:  # type: ignore[no-untyped-def]
    case.run(lane)
    torch.cuda.synchronize()
