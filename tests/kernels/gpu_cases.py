"""The cases of a kernel as a part of the check on a GPU; the Triton interpreter takes them too."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.parts import raise_failed
from mmaccel.kernels.device_errors import is_device_error
from tests.kernels.case import Case, Lane, cases_of, lanes_of


def run_cases(kernel: str, device: torch.device) -> dict[str, Any]:
    """Run every case of a kernel in all its dtypes, large ones and bfloat16 on GPUs alone.

    Raises:
        CheckError: some failed; every one of them is named with its message.
        RuntimeError: the device failed.
    """
    rows = []
    for case in cases_of(kernel):
        for lane in lanes_of(case, "triton", device):  # where one fails the others still run
            name = f"{case.name}, {str(lane.dtype).removeprefix('torch.')}"
            rows.append({"name": name, "wrong": find_fault(case, lane)})
    found = {"passed": sum(not row["wrong"] for row in rows)}
    raise_failed(rows, "cases", found)
    return found


def find_fault(case: Case, lane: Lane) -> str:
    """What a case complains of, and where; empty where the version and specification agree.

    Raises:
        RuntimeError: the device failed.
    """
    try:
        case.run(lane)
        if lane.device.type == "cuda":
            torch.cuda.synchronize(lane.device)
    except Exception as error:
        if is_device_error(error):
            error.add_note(f"in {case.name}, {str(lane.dtype).removeprefix('torch.')}")
            raise
        return f"{type(error).__name__}: {error}{_where(error)}"
    return ""


def _where(error: Exception) -> str:
    """File and line, since a plain assert has no message."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    code = trace.tb_frame.f_code
    return f" ({code.co_name}, line {trace.tb_lineno})"
