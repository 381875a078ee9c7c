"""Every operation in plain loops and in numpy makes what its specification in torch makes.

The same cases are run for Triton by tests/kernels/interpreted and, compiled, by tests/gpu.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.case import Case, Lane, all_runs

RUNS = [
    pytest.param(case, lane, id=f"{version}, {name}")
    for version in ("plain", "numpy")
    for name, case, lane in all_runs(version, torch.device("cpu"))
]


@pytest.mark.parametrize(("case", "lane"), RUNS)
def test_a_version_equals_the_specification(case: Case, lane: Lane) -> None:
    case.run(lane)
