"""The environment of the steps: a wheel of this checkout, installed where nothing else is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_CPU_BUILDS = "https://download.pytorch.org/whl/cpu"  # as scripts/environment.sh
_SOURCES = ("mmaccel", "kernels", "tokenizers_vq", "samplers", "pipelines")
_FILES = ("pyproject.toml", "README.md", "LICENSE")


def make_environment(folder: Path) -> Path:
    """Build a wheel of a copy of the checkout, and install it; returns the new Python."""
    copy = folder / "copy"
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in _SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=unwanted)
    for name in _FILES:
        shutil.copy(ROOT / name, copy / name)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", copy, "--no-deps", "-w", folder], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "-q", wheel, *_torch()], check=True)
    return python


def _torch() -> list[str]:
    """The CPU build of torch where there is no NVIDIA GPU, as scripts/environment.sh takes it."""
    if shutil.which("nvidia-smi") or sys.platform != "linux":
        return []
    try:
        urllib.request.urlopen(f"{_CPU_BUILDS}/torch/", timeout=5).close()
    except OSError:
        return ["torch>=2.6,<2.14"]
    return ["torch>=2.6,<2.14", "--extra-index-url", _CPU_BUILDS]


def clean_environment(python: Path, home: Path) -> dict[str, str]:
    """Variables of a user who has set none: PATH, HOME, a language, and how pip reaches its index.

    One thread, so that no command measures how many are best.
    """
    kept = ("PIP_", "SSL_", "REQUESTS_", "http_proxy", "https_proxy", "no_proxy", "UV_")
    own = {name: value for name, value in os.environ.items() if name.startswith(kept)}
    path = os.pathsep.join([str(python.parent), "/usr/local/bin", "/usr/bin", "/bin"])
    own |= {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", "TERM": "dumb", "COLUMNS": "100"}
    return own | {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_XET": "1"}
