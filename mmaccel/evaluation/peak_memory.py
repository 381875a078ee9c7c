"""The most memory that a stretch of a program used: on the device, or of the process.

On CUDA the allocator counts. On Linux the kernel keeps the process's largest resident size and
forgets it when told to (`clear_refs`, proc(5)), weights and libraries included; elsewhere nothing
can be told for a stretch alone.
"""

from __future__ import annotations

from pathlib import Path

import torch

_FORGET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def reset_peak(device: torch.device | str) -> None:
    """Begin a stretch."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _FORGET.write_text("5")
    except OSError:  # not Linux, or not allowed: `read_peak` says None
        return


def read_peak(device: torch.device | str) -> int | None:
    """Bytes at the peak since `reset_peak`; None where nothing tells."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        if not _FORGET.exists():
            return None
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("VmHWM:")]
    return int(found[0][1]) * 1024 if found else None
