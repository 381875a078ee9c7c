"""Versions and device of a run, for metadata and reports."""

from __future__ import annotations

import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mmaccel


@cache  # reads files, and is called for every image
def package_version(name: str) -> str | None:
    """The installed version of a package, or None; imports nothing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Versions of all packages that an image depends on."""
    found = {name: package_version(name) for name in ("torch", "transformers", "numpy")}
    ours = {"mmaccel": mmaccel.__version__, "python": platform.python_version()}
    return ours | {name: value for name, value in found.items() if value is not None}


def cpu_name() -> str:
    """Name of the CPU, where the system has it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def describe_machine(device: str) -> dict[str, Any]:
    """Device, threads and versions, ready for JSON."""
    import torch

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name()
    return {
        "device": device,
        "name": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
    }
