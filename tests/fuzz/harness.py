"""Runs cases of the fuzz in this process and watches what they do."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from mmaccel.cli import main
from mmaccel.samplers import run_lock
from tests.fuzz.cases import Case
from tests.fuzz.hostile import MARKER

LIMIT = 20  # seconds of a case
CODES = {0, 1, 2, 3, 130}  # that are documented
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {  # audit event -> which argument is a path that it changes
    "os.mkdir": 0, "os.rmdir": 0, "os.remove": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1,
    "os.truncate": 0, "os.chmod": 0, "shutil.rmtree": 0, "shutil.copyfile": 1, "shutil.move": 1,
}  # fmt: skip
_PROGRAMS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pty.spawn")
_ASKED = ("fc-list", "g++")  # matplotlib asks for its fonts, torch for its compiler's version


class Hang(BaseException):
    """A case ran longer than `LIMIT`."""


class Watch:
    """Notes files that are changed outside a folder, and programs that are started.

    Python has no way to remove an audit hook, so it is there for good, and idle between cases.
    """

    def __init__(self) -> None:
        self._inside: str | None = None
        self._found: list[str] = []
        sys.addaudithook(self._hook)

    @contextlib.contextmanager
    def over(self, folder: Path) -> Iterator[list[str]]:
        """Watch while the block runs."""
        self._inside, self._found = os.path.realpath(folder), []
        try:
            yield self._found
        finally:
            self._inside = None

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._inside is None:
            return
        if event in _PROGRAMS and arguments[0] not in _ASKED:
            self._found.append(f"{event} {arguments!r:.200}")
        path = arguments[_CHANGES[event]] if event in _CHANGES else None
        if event == "open":
            path, mode, flags = arguments
            is_writing = bool((flags or 0) & _WRITING) or any(c in (mode or "") for c in "wax+")
            path = path if is_writing else None
        if path is None or isinstance(path, int):
            return
        inside, self._inside = self._inside, None  # realpath must not be watched itself
        folder, name = os.path.split(os.fsdecode(path))
        real = os.path.join(os.path.realpath(folder), name)
        self._inside = inside
        is_known = real.startswith(("/dev/null", "/dev/tty", "/proc/")) or "__pycache__" in real
        if not is_known and not f"{real}{os.sep}".startswith(f"{inside}{os.sep}"):
            self._found.append(f"{event} {real}")


def run_case(case: Case, folder: Path, watch: Watch) -> tuple[int | None, list[str]]:
    """Run a case in its folder; returns its exit code and what is wrong with it."""
    out, err, wrong = io.StringIO(), io.StringIO(), list[str]()
    code: int | None = None

    def ring(*_: Any) -> None:
        raise Hang

    before, stdin = os.getcwd(), sys.stdin
    os.chdir(folder)
    sys.stdin = io.TextIOWrapper(io.BytesIO(case.stdin))
    handler = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT)
    try:
        with (
            watch.over(folder) as found,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = main(case.arguments)
    except BaseException as error:
        wrong.append("".join(traceback.format_exception(error)[-4:]))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        sys.stdin = stdin
        os.chdir(before)
    wrong += [f"outside: {each}" for each in found]
    text = out.getvalue() + err.getvalue()
    if code is not None and code not in CODES:
        wrong.append(f"exit code {code}")
    if "Traceback (most recent call last)" in text:
        wrong.append("a traceback")
    if any(c in text for c in "\x1b\x9b\x07\u202e\x00"):
        wrong.append("a character that steers the terminal")
    if code == 2 and "mmaccel: " not in err.getvalue() and "Usage" not in text:
        wrong.append("exit code 2 without a message")
    if any(folder.rglob(MARKER)):
        wrong.append("code of an input ran")
    return code, wrong


class Stop(set[int]):
    """In place of the models that run: the first one ends its command, as Ctrl-C does."""

    def add(self, _: int) -> None:
        raise KeyboardInterrupt


def stop_at_work(patch: pytest.MonkeyPatch) -> None:
    """End commands where the first run of a model would begin, or a server listen."""

    def listen(_: object) -> None:
        raise KeyboardInterrupt

    patch.setattr(run_lock, "_running", Stop())
    patch.setattr(uvicorn.Server, "run", listen)


def peak_memory() -> int:
    """Most bytes that this process held at a time since `forget_peak`."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Begin to measure the peak of memory anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def limit_memory(more: int) -> tuple[int, int]:
    """Let this process take so many bytes more, and no others; returns the limit before.

    An allocation beyond it raises MemoryError instead of taking the machine's memory.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(line.split()[1]) * 1024 + more, before[1]))
    return before
