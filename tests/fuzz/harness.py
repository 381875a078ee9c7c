"""Runs cases of the fuzz in this process and watches what they do."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from mmaccel.cli import main
from tests.fuzz.cases import Case
from tests.fuzz.hostile import MARKER

LIMIT = 10  # seconds of a case
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {  # audit event -> which arguments are paths that it changes
    "os.mkdir": (0,), "os.rmdir": (0,), "os.remove": (0,), "os.rename": (0, 1), "os.link": (1,),
    "os.symlink": (1,), "os.truncate": (0,), "os.chmod": (0,), "os.chown": (0,),
    "shutil.rmtree": (0,), "shutil.copyfile": (1,), "shutil.move": (0, 1),
}  # fmt: skip
_PROGRAMS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pty.spawn")
_ASKED = ("fc-list", "g++")  # matplotlib asks for its fonts, torch for its compiler's version
_FORKS = "chat_templates.py"  # the one module that forks, and starts no program


class Hang(BaseException):
    """A case ran longer than `LIMIT`."""


class Watch:
    """Notes files that are changed outside a folder, and programs that are started.

    Python has no way to remove an audit hook, so it is there for good, and idle between cases.
    """

    def __init__(self) -> None:
        self.inside: str | None = None
        self.found: list[str] = []
        sys.addaudithook(self._hook)

    @contextlib.contextmanager
    def over(self, folder: Path) -> Iterator[list[str]]:
        """Watch while the block runs."""
        self.inside, self.found = os.path.realpath(folder), []
        try:
            yield self.found
        finally:
            self.inside = None

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.inside is None:
            return
        if event == "open":
            path, mode, flags = arguments
            is_writing = bool((flags or 0) & _WRITING) or any(c in (mode or "") for c in "wax+")
            if is_writing and not isinstance(path, int):
                self._note(event, path)
        elif event in _CHANGES:
            for index in _CHANGES[event]:
                self._note(event, arguments[index])
        elif event == "os.fork":
            if not sys._getframe(1).f_code.co_filename.endswith(_FORKS):
                self.found.append(event)
        elif event in _PROGRAMS and arguments[0] not in _ASKED:
            self.found.append(f"{event} {arguments!r:.200}")

    def _note(self, event: str, path: Any) -> None:
        if path is None or isinstance(path, int):
            return
        inside, self.inside = self.inside, None  # realpath must not be watched itself
        try:
            name = os.fsdecode(path)
            real = os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))
            own = ("/dev/null", "/dev/tty") if event == "open" else ()
            if not f"{real}{os.sep}".startswith(f"{inside}{os.sep}") and "__pycache__" not in real:
                if real not in own:
                    self.found.append(f"{event} {real}")
        finally:
            self.inside = inside


@dataclass
class Outcome:
    """What a case did.

    Attributes:
        code: its exit code; None if it raised.
        stdout, stderr: what it printed.
        complaints: what was wrong with it.
        seconds: how long it took.
    """

    code: int | None
    stdout: str
    stderr: str
    complaints: list[str] = field(default_factory=list)
    seconds: float = 0.0


def run_case(case: Case, folder: Path, watch: Watch) -> Outcome:
    """Run a case in its folder, and judge it."""
    out, err, complaints = io.StringIO(), io.StringIO(), list[str]()
    code: int | None = None

    def ring(number: int, frame: FrameType | None) -> None:
        where = "".join(traceback.format_stack(frame)[-3:])
        raise Hang(f"in\n{where}")

    before, stdin, began = os.getcwd(), sys.stdin, time.perf_counter()
    os.chdir(folder)
    sys.stdin = io.TextIOWrapper(io.BytesIO(case.stdin))
    handler = signal.signal(signal.SIGALRM, ring)
    try:
        with (
            watch.over(folder.parent) as found,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            signal.setitimer(signal.ITIMER_REAL, LIMIT)
            try:
                code = main(case.arguments)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        kind = "hang" if isinstance(error, Hang) else "traceback"
        complaints.append(f"{kind}: {''.join(traceback.format_exception(error)[-4:])}")
    finally:
        signal.signal(signal.SIGALRM, handler)
        sys.stdin = stdin
        os.chdir(before)
    complaints += [f"outside: {each}" for each in found]
    outcome = Outcome(code, out.getvalue(), err.getvalue(), complaints)
    outcome.seconds = time.perf_counter() - began
    judge(case, outcome, folder)
    return outcome


def judge(case: Case, outcome: Outcome, folder: Path) -> None:
    """Add what is wrong with the outcome of a case to its complaints."""
    wrong = outcome.complaints
    if outcome.code is not None and outcome.code not in case.codes:
        wrong.append(f"exit code {outcome.code}, expected one of {sorted(case.codes)}")
    for name, text in (("stdout", outcome.stdout), ("stderr", outcome.stderr)):
        if "Traceback (most recent call last)" in text:
            wrong.append(f"a traceback on {name}")
        if any(c in text for c in "\x1b\x9b\x07\u202e\x00"):
            wrong.append(f"a character on {name} that steers the terminal")
    if outcome.code == 2 and "mmaccel: " not in outcome.stderr and "Usage" not in outcome.stdout:
        wrong.append("exit code 2 without a message")
    if any(folder.parent.rglob(MARKER)):
        wrong.append("code of an input ran")


def stub_work(patch: pytest.MonkeyPatch) -> None:
    """Load each model once, and end commands where their work would begin, or after a token."""
    from mmaccel import loading
    from mmaccel.batch.job import Job
    from mmaccel.commands.bench import canvas as bench_canvas
    from mmaccel.commands.jobs import codec as codec_job
    from mmaccel.commands.jobs import media as media_job
    from mmaccel.commands.jobs.answer import AnswerJob
    from mmaccel.commands.jobs.image import ImageJob
    from mmaccel.evaluation import measure
    from mmaccel.evaluation.exactness import report

    for module, name in ((loading, "open_pipeline"), (codec_job, "open_pipe")):
        patch.setattr(module, name, _once(getattr(module, name)))
    patch.setattr(Job, "run", lambda self, executor: self.outcome)
    patch.setattr(ImageJob, "run", lambda self: None)
    patch.setattr(media_job.MediaJob, "run", lambda self: None)
    patch.setattr(AnswerJob, "run", lambda self: self.decode(None))  # a token, with its methods
    patch.setattr(report, "check_all", lambda plan: [])
    patch.setattr(measure, "measure", lambda *_, **__: iter(()))
    patch.setattr(bench_canvas, "measure_models", lambda *_: iter(()))


def _once(function: Any) -> Any:
    """`function`, which returns the same object for equal arguments; exceptions are not kept, and
    nothing of the folder `own`, which a case changes.
    """
    known: dict[str, Any] = {}

    def call(*args: Any, **options: Any) -> Any:
        key = repr((args, sorted(options.items(), key=str)))
        if "'own'" in key:
            return function(*args, **options)
        if key not in known:
            known[key] = function(*args, **options)
        return known[key]

    return call


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
