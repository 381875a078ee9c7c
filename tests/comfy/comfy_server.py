"""A real ComfyUI as a process: where it is, what it is given, and how it is started.

COMFYUI_PATH names the folder of one, COMFYUI_PYTHON the Python that has what ComfyUI and mmaccel
need.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mmaccel.cli import main
from tests.architecture.source import ROOT

HOME = os.environ.get("COMFYUI_PATH", "")
PYTHON = os.environ.get("COMFYUI_PYTHON", sys.executable)
WORKFLOWS = ROOT / "mmaccel" / "comfy" / "pack" / "example_workflows"


def environment() -> dict[str, str]:
    """What its processes are started with."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def make_base(folder: Path) -> Path:
    """What `--base-directory` names, with our pack alone."""
    for name in ("user", "input", "output", "temp", "models", "custom_nodes"):
        (folder / name).mkdir(parents=True)
    assert main(["comfy", str(folder)]) == 0
    return folder


def free_port() -> int:
    """A port nobody listens to at the moment."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port: int = asked.getsockname()[1]
        return port


@contextmanager
def running(base: Path) -> Iterator[str]:
    """A server; its address. What it prints is in `base/server.log`."""
    port, log = free_port(), base / "server.log"
    command = [PYTHON, "main.py", "--cpu", "--listen", "127.0.0.1", "--port", str(port)]
    command += ["--base-directory", str(base), "--disable-api-nodes"]
    command += ["--database-url", "sqlite:///:memory:"]
    with log.open("w", encoding="utf-8") as opened:
        server = subprocess.Popen(
            command, cwd=HOME, env=environment(), stdout=opened, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            for _ in range(240):
                assert server.poll() is None, log.read_text(encoding="utf-8")
                if "To see the GUI" in log.read_text(encoding="utf-8"):
                    break
                time.sleep(0.5)
            else:
                pytest.fail(f"no server after two minutes: {log.read_text(encoding='utf-8')}")
            yield f"http://127.0.0.1:{port}"
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
            server.wait(20)
