"""Where a model runs and in which number format: "auto", names, and torch's own objects."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from mmaccel.checks import show
from mmaccel.errors import MissingBackendError, OptionError

AUTO = "auto"
DTYPES = {  # every name that is understood, by the one that is written into results
    "float32": ("float32", "fp32", "float", "single"),
    "bfloat16": ("bfloat16", "bf16"),
    "float16": ("float16", "fp16", "half"),
    "float64": ("float64", "fp64", "double"),
}
_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
_BY_NAME = {name: own for own, names in DTYPES.items() for name in names}


def choose_device(device: Any = AUTO) -> Any:
    """The device that "auto" means on this machine: CUDA, MPS, XPU, else the CPU."""
    if not isinstance(device, str) or device != AUTO:
        return device
    for name in ("cuda", "mps", "xpu"):
        backend = getattr(torch, name, None)
        if backend is not None and backend.is_available():
            return name
    return "cpu"


def choose_dtype(dtype: Any = AUTO, device: Any = "cpu") -> torch.dtype:
    """A torch dtype of "auto", a name in `DTYPES` (also as "torch.float16"), or itself.

    "auto" is bfloat16 on a GPU that computes it, float16 on other GPUs, float32 on a CPU, where
    it keeps every guarantee.
    """
    if isinstance(dtype, str) and dtype.lower() == AUTO:
        kind = torch.device(device).type
        if kind == "cuda":
            is_new = torch.cuda.get_device_capability(device)[0] >= 8
            return torch.bfloat16 if is_new else torch.float16
        usual = {"cpu": torch.float32, "mps": torch.float16}
        return usual.get(kind, torch.bfloat16)
    name = _BY_NAME.get(dtype.lower().removeprefix("torch.")) if isinstance(dtype, str) else None
    chosen = dtype if name is None else getattr(torch, name)
    if str(chosen).removeprefix("torch.") not in DTYPES or not isinstance(chosen, torch.dtype):
        raise OptionError(
            f"dtype: expected auto, {', '.join(DTYPES)}, bf16, fp16, fp32 or one of torch's, "
            f"received {show(dtype)}; float32 keeps every guarantee"
        )
    return chosen


def choose_placement(
    device: Any = AUTO, dtype: Any = AUTO, device_map: Any = None
) -> tuple[Any, torch.dtype]:
    """Device and dtype of a model; of a device map, the device of its inputs and of other parts."""
    if device_map is not None:
        if not (isinstance(device, str) and device == AUTO):
            raise OptionError(
                f"device: expected none with a device_map, which says where everything is, "
                f"received {show(device)} and {show(device_map)}; leave one of them out"
            )
        check_accelerate("device_map")
        device = find_main_device(device_map)
    device = choose_device(device)
    is_auto = isinstance(dtype, str) and dtype == AUTO
    kind = choose_dtype(torch.float32 if is_auto else dtype)
    try:
        float(torch.zeros(1, device=device, dtype=kind))
    except Exception as error:  # each backend has its own, and some are missing from a build
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise OptionError(
            f"device: expected a device of this machine, received {show(device)} "
            f"({reason}); auto takes {choose_device()}"
        ) from error
    return device, choose_dtype(dtype, device)


def find_main_device(device_map: Any) -> Any:
    """The device that a device map runs a model on: of several the first that computes.

    A map is a strategy of accelerate, a device ("cuda:1", "cpu", a number, "disk"), or devices by
    names of modules.
    """
    if isinstance(device_map, str) and device_map in _STRATEGIES:
        return choose_device()
    if isinstance(device_map, str | int | torch.device) and not isinstance(device_map, bool):
        return _name_device(device_map)
    places = list(device_map.values()) if isinstance(device_map, Mapping) else []
    if not places or not all(isinstance(p, str | int | torch.device) for p in places):
        raise OptionError(
            f"device_map: expected {', '.join(_STRATEGIES)}, a device, or devices by names of "
            f"modules, received {show(device_map)}; auto fills one device after the other"
        )
    names = [str(_name_device(place)) for place in places]
    return next((name for name in names if name not in ("cpu", "disk")), "cpu")


def _name_device(place: Any) -> Any:
    return f"{choose_device()}:{place}" if isinstance(place, int) else place


def check_accelerate(what: str) -> None:
    if find_spec("accelerate") is None:
        raise MissingBackendError(
            f"{what}: expected the package accelerate, which places and moves models, received "
            "none; pip install accelerate"
        )


def name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
