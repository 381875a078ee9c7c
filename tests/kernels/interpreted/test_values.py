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
    from tests.kernels.case import all_runs

    RUNS = [pytest.param(*run[1:], id=run[0]) for run in all_runs("triton", torch.device("cpu"))]
else:
    RUNS = []


@pytest.mark.parametrize(("case", "lane"), RUNS)
def test_triton_equals_specification(case, lane) -> None:  # type: ignore[no-untyped-def]
    case.run(lane)
