"""Runs steps, each in an empty folder with a home of its own, and compares what is printed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from scripts.first_day.step import Run, Step
from tests.fixtures.fake_hub import serve_hub

ROOT = Path(__file__).resolve().parents[2]
_SECONDS = 600  # of a run at most
_SMALL_DISK = "/dev/shm"  # in memory on Linux, and smaller than the disk of temporary files
_NOBODY = "http://127.0.0.1:9"
_CPU_BUILDS = "https://download.pytorch.org/whl/cpu"  # as scripts/environment.sh
_SOURCES = ("mmaccel", "kernels", "tokenizers_vq", "samplers", "pipelines")
_TINY = """
import sys
from pathlib import Path
from tests.fixtures.checkpoints import build_checkpoint
from tests.fixtures.speech import build_speech
folder = Path(sys.argv[1])
build_checkpoint("janus", folder / "janus")
build_speech("llasa", folder)
"""


class StepError(AssertionError):
    """A step that did not do what it must."""


@dataclass(frozen=True)
class Runner:
    """Runs steps.

    Attributes:
        python: of the environment with the library.
        folder: for the folders of the steps.
        hub: address of the hub on localhost.
        extra: further variables of the environment.
    """

    python: Path
    folder: Path
    hub: str
    extra: Mapping[str, str] = field(default_factory=dict)

    def is_possible(self, step: Step) -> bool:
        """Whether the environment has what a step needs, and lacks what it is about."""
        return all(map(self._has, step.needs)) and not any(map(self._has, step.lacks))

    def _has(self, name: str) -> bool:
        """A package, or a path."""
        if "/" in name:
            return Path(name).exists()
        source = f"import sys, importlib.util as u; sys.exit(u.find_spec({name!r}) is None)"
        environment = os.environ | dict(self.extra)
        return not subprocess.call([self.python, "-c", source], cwd=self.folder, env=environment)

    def run(self, step: Step, name: str) -> None:
        """Do a step.

        Args:
            step: it.
            name: of its folder.

        Raises:
            StepError: another exit status or output, or a message without the remedy.
        """
        work = self.folder / name / "work"
        work.mkdir(parents=True)
        (work.parent / "home").mkdir()
        for file, text in step.files.items():
            (work / file).parent.mkdir(parents=True, exist_ok=True)
            (work / file).write_text(text, encoding="utf-8")
        with socket.socket() as opened:
            opened.bind(("127.0.0.1", 0))
            port = str(opened.getsockname()[1])
        server = self._serve(step.server.replace("{port}", port), work) if step.server else None
        try:
            said = [self._do(run, step, port, work) for run in (step.run, step.then) if run]
        finally:
            if server is not None:
                server.send_signal(signal.SIGTERM)
                server.wait(_SECONDS)
        if server is not None and server.returncode:
            raise StepError(f"{step.title}: the server ended with {server.returncode}, not 0")
        if _flat(step.remedy) not in said[0]:
            raise StepError(f"{step.title}: expected the remedy {step.remedy!r} in: {said[0]}")

    def _do(self, run: Run, step: Step, port: str, work: Path) -> str:
        """What was printed, on one line."""
        text = run.text.replace("{port}", port)
        log = work.parent / f"{len(list(work.parent.iterdir()))}.txt"
        is_stopped = not run.stop_at
        with log.open("wb") as opened:
            command = ["python", "-c", text] if run.is_python else ["bash", "-c", text]
            process = self._start(command, run.net, work, opened)
            end = time.monotonic() + _SECONDS
            while process.poll() is None:
                if time.monotonic() > end:
                    os.killpg(process.pid, signal.SIGKILL)
                if not is_stopped and _is_reached(run.stop_at, work, log):
                    os.killpg(process.pid, signal.SIGINT)
                    is_stopped = True
                time.sleep(0.02)
        output = log.read_text(encoding="utf-8", errors="replace")
        shown = "\n".join([f"{step.title}: {text}", *output.splitlines()[-30:]])
        if process.returncode != run.code:
            raise StepError(f"exit status {process.returncode}, not {run.code}. {shown}")
        if not re.search(run.says, _flat(output)):
            raise StepError(f"nothing like {run.says!r} was printed. {shown}")
        return _flat(output)

    def _start(self, command: list[str], net: str, work: Path, log: IO) -> subprocess.Popen:
        """Start a command for a user who has set no variable but PATH, HOME and a language, with
        how pip reaches its index; one thread, so that no command measures how many are best.
        """
        kept = ("PIP_", "SSL_", "REQUESTS_", "http_proxy", "https_proxy", "no_proxy", "UV_")
        own = {name: value for name, value in os.environ.items() if name.startswith(kept)}
        own |= {
            "PATH": f"{self.python.parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(work.parent / "home"),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "COLUMNS": "100",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_ENDPOINT": self.hub if net == "hub" else _NOBODY,
            **self.extra,
        }
        return subprocess.Popen(
            command,
            cwd=work,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # a shell in the background ignores Ctrl-C, and this script may be in one
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def _serve(self, command: str, work: Path) -> subprocess.Popen:
        """Start a server, and wait until it has said its address."""
        log = work.parent / "server.txt"
        with log.open("wb") as opened:
            process = self._start(["bash", "-c", f"exec {command}"], "none", work, opened)
        end = time.monotonic() + _SECONDS
        while "http://" not in log.read_text(encoding="utf-8"):
            if process.poll() is not None or time.monotonic() > end:
                raise StepError(f"{command}: no server: {log.read_text(encoding='utf-8')}")
            time.sleep(0.05)
        return process


@contextmanager
def open_runner(
    python: Path, folder: Path, extra: Mapping[str, str] | None = None
) -> Iterator[Runner]:
    """Start the hub, and yield what runs steps.

    Args:
        python: of an environment with the library.
        folder: an empty one.
        extra: further variables of the environment.
    """
    hub = folder / "hub"
    hub.mkdir()
    demo = ROOT / "mmaccel" / "demo" / "weights" / "scenes"
    repositories = {
        "own/scenes": demo,
        "own/gated": demo,
        "own/large": Path(shutil.copytree(demo, hub / "large")),
        "deepseek-ai/Janus-Pro-1B": _stand_in(hub / "a", "config", model_type="multi_modality"),
        "black-forest-labs/FLUX.1-dev": _stand_in(
            hub / "b", "model_index", _class_name="FluxPipeline"
        ),
        "own/lora": _stand_in(hub / "c", "adapter_config", peft_type="LORA"),
        "deepseek-community/Janus-Pro-1B": hub / "janus",
        "HKUSTAudio/Llasa-1B": hub / "llasa",
        "HKUSTAudio/xcodec2-hf": hub / "xcodec2",
    }
    (hub / "large" / "more.safetensors").write_bytes(b"x")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    write = [python, "-c", _TINY, hub]
    subprocess.run(write, check=True, env=environment, capture_output=True)
    free = shutil.disk_usage(_SMALL_DISK).free if Path(_SMALL_DISK).exists() else 0
    with serve_hub(repositories, {"more.safetensors": free + 2**30}) as (address, _):
        yield Runner(python, folder, address, extra or {})


def _stand_in(folder: Path, file: str, **content: Any) -> Path:
    folder.mkdir()
    (folder / f"{file}.json").write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    return folder


def make_environment(folder: Path) -> Path:
    """Build a wheel of a copy of the checkout, and install it where nothing else is, with the CPU
    build of torch where there is no NVIDIA GPU, as scripts/environment.sh; returns the new Python.
    """
    copy, python = folder / "copy", folder / "venv" / "bin" / "python"
    for name in _SOURCES:
        unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, ignore=unwanted)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    venv.create(folder / "venv", with_pip=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", copy, "--no-deps", "-w", folder], check=True)
    wanted = [str(wheel) for wheel in folder.glob("*.whl")]
    if sys.platform == "linux" and not shutil.which("nvidia-smi"):
        wanted.append("torch>=2.6,<2.14")
        try:
            urllib.request.urlopen(f"{_CPU_BUILDS}/torch/", timeout=5).close()
            wanted += ["--extra-index-url", _CPU_BUILDS]
        except OSError:
            pass  # pip's own index may have one
    subprocess.run([*pip, "install", "-q", *wanted], check=True)
    return python


def _is_reached(stop_at: str, work: Path, log: Path) -> bool:
    text = stop_at.removeprefix("text:")
    return text in log.read_text(errors="replace") if text != stop_at else any(work.glob(stop_at))


def _flat(text: str) -> str:
    return " ".join(text.split())
