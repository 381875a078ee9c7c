"""Hundreds of generated bad inputs over all commands and kinds of files.

No case may end in a traceback, hang, exit with an undocumented code, write outside its folder, run
code of an input, print what steers a terminal, or take gigabytes. A case is a seed; a failure
prints the command that builds and runs it again.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.architecture.source import ROOT
from tests.fuzz.cases import COMMANDS, Case, build_case
from tests.fuzz.harness import (
    Watch,
    forget_peak,
    limit_memory,
    peak_memory,
    run_case,
    stop_at_work,
)
from tests.fuzz.world import add_nodes, build_world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, makes FIFOs"),
]
CASES = 3000
VALID = [line for line in COMMANDS if "--prompts -" not in line]
MEMORY = 3 * 2**30


def test_no_input_does_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template, folder = tmp_path / "template", tmp_path / "case"
    build_world(template)
    for name in ("TMPDIR", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(folder))
    stop_at_work(monkeypatch)
    watch = Watch()
    forget_peak()
    before = limit_memory(MEMORY)
    codes: dict[object, int | None] = {}
    failures: dict[object, list[str]] = {}
    for name in (*VALID, *range(CASES)):
        shutil.copytree(template, folder)
        add_nodes(folder)
        case = Case(shlex.split(name)) if isinstance(name, str) else build_case(name, folder)
        codes[name], wrong = run_case(case, folder, watch)
        if wrong:
            failures[name] = wrong
        shutil.rmtree(folder)
    resource.setrlimit(resource.RLIMIT_DATA, before)
    assert not failures, "python -m tests.fuzz.cases SEED FOLDER runs a case"
    assert {codes[line] for line in VALID} == {0, 130}
    assert peak_memory() < MEMORY


CHILDREN = (
    ["generate", "a red circle", "--count", "1000000000"],
    ["generate", "--prompts", "zero.jsonl"],
    ["generate", "--prompts", "fifo.jsonl"],
    ["generate", "--prompts", "-"],
    ["generate", "a red circle", "--set", "window={[]:1}", "--policy", "jacobi"],
    ["evaluate", "pictures", "plain", "--clip", "tests.fuzz.leaving:f"],
)


@pytest.mark.parametrize("arguments", CHILDREN, ids=range(len(CHILDREN)))
def test_a_real_process_refuses(arguments: list[str], tmp_path: Path) -> None:
    """The commands as users run them, with nothing stubbed; standard input never ends."""
    folder = tmp_path / "case"
    build_world(folder)
    add_nodes(folder)
    program = [sys.executable, "-m", "mmaccel.cli", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    limited = {resource.RLIMIT_DATA: MEMORY, resource.RLIMIT_CPU: 60}

    def limit() -> None:
        for which, most in limited.items():
            resource.setrlimit(which, (most, most))

    with endless() as stdin:
        done = subprocess.run(
            program, cwd=folder, env=environment, stdin=stdin, capture_output=True, text=True,
            timeout=120, preexec_fn=limit,
        )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert done.stderr.startswith("mmaccel: ") and done.stderr.count("\n") == 1


@contextmanager
def endless() -> Iterator[IO[bytes]]:
    """A stream of zeros."""
    program = "import sys\nwhile True: sys.stdout.buffer.write(bytes(2**20))"
    writer = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert writer.stdout is not None
    try:
        yield writer.stdout
    finally:
        writer.kill()
        writer.communicate()
