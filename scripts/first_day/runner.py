"""Runs steps, each in an empty folder with a home of its own, and compares what is printed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from scripts.first_day.environment import clean_environment
from scripts.first_day.hub import build_repositories
from scripts.first_day.step import Run, Step
from tests.fixtures.fake_hub import serve_hub

_SECONDS = 600  # of a run at most
SMALL_DISK = "/dev/shm"  # in memory on Linux, and smaller than the disk of temporary files
_NOBODY = "http://127.0.0.1:9"


class StepError(AssertionError):
    """A step that did not do what it must."""


@dataclass(frozen=True)
class Done:
    """A finished run.

    Attributes:
        run: what was done.
        output: stdout and stderr together.
        code: exit status.
    """

    run: Run
    output: str
    code: int


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
        packages = [*step.lacks, *(name for name in step.needs if "/" not in name)]
        source = (
            "import sys, importlib.util as u; print(*[bool(u.find_spec(n)) for n in sys.argv[1:]])"
        )
        asked = [str(self.python), "-c", source, *packages]
        printed = subprocess.run(
            asked,
            capture_output=True,
            text=True,
            check=True,
            cwd=self.folder,
            env=os.environ | dict(self.extra),
        ).stdout.split()
        there = dict(zip(packages, (text == "True" for text in printed)))
        paths = [Path(name).exists() for name in step.needs if "/" in name]
        is_lacking = not any(there[name] for name in step.lacks)
        return is_lacking and all(there[n] for n in step.needs if "/" not in n) and all(paths)

    def run(self, step: Step, name: str) -> list[Done]:
        """Do a step.

        Args:
            step: it.
            name: of its folder.

        Raises:
            StepError: another exit status or output, or a message without the remedy.
        """
        work, home = self.folder / name / "work", self.folder / name / "home"
        work.mkdir(parents=True)
        home.mkdir()
        for file, text in step.files.items():
            (work / file).parent.mkdir(parents=True, exist_ok=True)
            (work / file).write_text(text, encoding="utf-8")
        port = _free_port()
        done = []
        server = (
            self._serve(step.server.replace("{port}", str(port)), work, home)
            if step.server
            else None
        )
        try:
            for run in (step.run, step.then):
                if run is not None:
                    done.append(self._do(run, step, port, work, home))
        finally:
            if server is not None:
                server.send_signal(signal.SIGTERM)
                code = server.wait(_SECONDS)
        if server is not None and code:
            raise StepError(f"{step.title}: the server ended with {code}, not 0")
        said = _flat(done[0].output)
        if step.remedy and _flat(step.remedy) not in said:
            raise StepError(f"{step.title}: expected the remedy {step.remedy!r} in: {said}")
        return done

    def _do(self, run: Run, step: Step, port: int, work: Path, home: Path) -> Done:
        text = run.text.replace("{port}", str(port))
        command = ["python", "-c", text] if run.is_python else ["bash", "-c", text]
        log = home.parent / f"{len(list(home.parent.iterdir()))}.txt"
        with log.open("wb") as opened:
            process = self._start(command, run.net, work, home, opened)
            end, is_stopped = time.monotonic() + _SECONDS, False
            while process.poll() is None:
                if time.monotonic() > end:
                    os.killpg(process.pid, signal.SIGKILL)
                if run.stop_at and not is_stopped and _is_reached(run.stop_at, work, log):
                    os.killpg(process.pid, signal.SIGINT)
                    is_stopped = True
                time.sleep(0.02)
        output = log.read_text(encoding="utf-8", errors="replace")
        shown = "\n".join([f"{step.title}: {text}", *output.splitlines()[-30:]])
        if process.returncode != run.code:
            raise StepError(f"exit status {process.returncode}, not {run.code}. {shown}")
        if not re.search(run.says, _flat(output)):
            raise StepError(f"nothing like {run.says!r} was printed. {shown}")
        return Done(run, output.replace(str(port), "8000"), process.returncode)

    def _start(
        self, command: list[str], net: str, work: Path, home: Path, log: IO
    ) -> subprocess.Popen:
        endpoint = self.hub if net == "hub" else _NOBODY
        own = clean_environment(self.python, home) | {"HF_ENDPOINT": endpoint, **self.extra}
        return subprocess.Popen(
            command,
            cwd=work,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_take_interrupts,
        )

    def _serve(self, command: str, work: Path, home: Path) -> subprocess.Popen:
        """Start a server, and wait until it has said its address."""
        log = home.parent / "server.txt"
        with log.open("wb") as opened:
            process = self._start(["bash", "-c", f"exec {command}"], "none", work, home, opened)
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
    (folder / "hub").mkdir()
    repositories = build_repositories(folder / "hub", python)
    free = shutil.disk_usage(SMALL_DISK).free if Path(SMALL_DISK).exists() else 0
    with serve_hub(repositories, {"more.safetensors": free + 2**30}) as (address, _):
        yield Runner(python, folder, address, extra or {})


def _is_reached(stop_at: str, work: Path, log: Path) -> bool:
    text = stop_at.removeprefix("text:")
    return text in log.read_text(errors="replace") if text != stop_at else any(work.glob(stop_at))


def _take_interrupts() -> None:
    """Ctrl-C is ignored in what a shell starts in the background, as this script may have been."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
        return port


def _flat(text: str) -> str:
    return " ".join(text.split())
