"""Why Triton cannot use the GPUs that torch finds: too old, or no C compiler for its launchers."""

from __future__ import annotations

from importlib import import_module

import torch

from mmaccel.kernels.device_errors import is_device_error

OLDEST = (8, 0)  # compute capability; the oldest that the kernels are compiled for in tests


def find_gpu_obstacle() -> str | None:
    """The reason; None if nothing does, or torch finds no GPU."""
    if not torch.cuda.is_available():
        return None
    if torch.version.hip is None:
        oldest = min(map(torch.cuda.get_device_capability, range(torch.cuda.device_count())))
        if oldest < OLDEST:
            there, least = (".".join(map(str, pair)) for pair in (oldest, OLDEST))
            return (
                f"a GPU of compute capability {there} is there, older than {least}; hide it with "
                "CUDA_VISIBLE_DEVICES"
            )
    try:
        import_module("triton.runtime").driver.active.get_current_target()
    except Exception as error:  # whatever its driver raises where it cannot be built
        if is_device_error(error):
            raise
        said = " ".join(str(error).split())[:120]
        return f"Triton's driver does not start ({type(error).__name__}: {said})"
    return None
