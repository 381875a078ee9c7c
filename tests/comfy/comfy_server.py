"""A real ComfyUI as a process: where it is, what it is given, how it is started and asked.

COMFYUI_PATH names the folder of one, COMFYUI_PYTHON the Python that has what ComfyUI and mmaccel
need.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mmaccel.cli import main
from tests.architecture.source import ROOT

HOME = os.environ.get("COMFYUI_PATH", "")
PYTHON = os.environ.get("COMFYUI_PYTHON", sys.executable)
WORKFLOWS = ROOT / "mmaccel" / "comfy" / "pack" / "example_workflows"


@contextmanager
def running(base: Path) -> Iterator[str]:
    """A server with our pack alone; its address. What it prints is in `base/server.log`."""
    for name in ("user", "input", "output", "temp", "models", "custom_nodes"):
        (base / name).mkdir(parents=True)
    assert main(["comfy", str(base)]) == 0
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{asked.getsockname()[1]}"
    command = [PYTHON, "main.py", "--cpu", "--listen", "127.0.0.1", "--port", url.split(":")[-1]]
    command += ["--base-directory", str(base), "--disable-api-nodes"]
    command += ["--database-url", "sqlite:///:memory:"]
    own = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (base / "server.log").open("w", encoding="utf-8") as log:
        server = subprocess.Popen(
            command, cwd=HOME, env=os.environ | own, stdout=log, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            for _ in range(240):
                said = (base / "server.log").read_text(encoding="utf-8")
                assert server.poll() is None, said
                if "To see the GUI" in said:
                    break
                time.sleep(0.5)
            else:
                pytest.fail(f"no server after two minutes: {said}")
            yield url
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
            server.wait(20)


def ask(url: str, body: Any = None) -> Any:
    """What a server answers, also to what it refuses."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked) as reply:
            content = reply.read()
    except urllib.error.HTTPError as error:
        content = error.read()
    return json.loads(content) if content else None


def read_graph(name: str) -> dict[str, Any]:
    """An example workflow in the API format."""
    text = (WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8")
    graph: dict[str, Any] = json.loads(text)
    return graph
