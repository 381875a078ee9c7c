"""What a figure was measured on: GPU, driver, versions, and the code that was run."""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_SOURCES = (
    "kernels",
    "tokenizers_vq",
    "samplers",
    "pipelines",
    "mmaccel",
    "benchmarks/gpu",
    "tests/kernels",
)


def describe(root: Path, device: torch.device, command: str) -> dict[str, Any]:
    """The facts of a report.

    Args:
        root: of the repository.
        device: that is measured.
        command: that measures.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {
        "device": name,
        "versions": _versions(device),
        "sources": digest(root),
        "commit": _ask(["git", "-C", str(root), "rev-parse", "HEAD"]),
        "command": command,
    }


def slug(name: str) -> str:
    """A device's name as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def digest(root: Path) -> str:
    """Of all sources: it tells code that was changed and not committed, and needs no git."""
    total = hashlib.sha256()
    for folder in _SOURCES:
        for file in sorted((root / folder).rglob("*.py")):
            total.update(f"{file.relative_to(root).as_posix()}\0".encode())
            total.update(file.read_bytes())
    return total.hexdigest()[:16]


def _versions(device: torch.device) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    if device.type == "cuda":
        found["CUDA"] = str(torch.version.cuda or torch.version.hip)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = _ask(query).splitlines()[0]
    return found


def _ask(command: list[str]) -> str:
    """The answer of a program, or "unknown" where it is not there or does not know."""
    if shutil.which(command[0]) is None:
        return "unknown"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    answer = done.stdout.strip()
    return answer if done.returncode == 0 and answer else "unknown"
