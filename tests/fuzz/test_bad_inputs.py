"""A thousand generated bad inputs over all commands and kinds of files.

No case may end in a traceback, hang, exit with an undocumented code, write outside its folder, run
code of an input, print what steers a terminal, or take gigabytes. A case is a seed; a failure
prints the command that builds and runs it again.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.architecture.source import ROOT
from tests.fuzz.cases import build_case
from tests.fuzz.harness import Watch, forget_peak, limit_memory, peak_memory, run_case, stub_work
from tests.fuzz.world import add_nodes, build_models, build_world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, makes FIFOs"),
]
CASES, PARTS = 1200, 6
MEMORY = 3 * 2**30


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "models"
    build_models(folder)
    return folder


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(autouse=True, scope="module")
def _stubbed() -> Iterator[None]:  # for all tests here
    with pytest.MonkeyPatch.context() as patch:
        stub_work(patch)
        yield


@pytest.mark.parametrize("part", range(PARTS))
def test_no_input_does_harm(part: int, models: Path, watch: Watch, tmp_path: Path) -> None:
    template, failures = tmp_path / "template", list[str]()
    build_world(template)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "models").symlink_to(models)
    patch = pytest.MonkeyPatch()
    for name in ("TMPDIR", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR"):
        patch.setenv(name, str(tmp_path / "run"))
    forget_peak()
    before = limit_memory(MEMORY)
    for seed in range(part, CASES, PARTS):
        folder = tmp_path / "run" / "case"
        shutil.copytree(template, folder)
        case = build_case(seed, folder)
        outcome = run_case(case, folder, watch)
        for complaint in outcome.complaints:
            failures.append(
                f"python -m tests.fuzz.cases {seed} FOLDER\n  {case.arguments}\n  {complaint}"
            )
        shutil.rmtree(folder)
    patch.undo()
    resource.setrlimit(resource.RLIMIT_DATA, before)
    assert not failures, f"{len(failures)} complaints:\n" + "\n".join(failures)
    assert peak_memory() < MEMORY


CHILDREN = {
    "a count": ["generate", "a red circle", "--count", "1000000000"],
    "a device": ["generate", "a red circle", "--prompts", "zero.jsonl"],
    "a pipe": ["generate", "--prompts", "fifo.jsonl"],
    "standard input": ["generate", "--prompts", "-"],
    "a size": ["generate", "a red circle", "--size", "9" * 5000],
    "a --set": ["generate", "a red circle", "--set", "window={[]:1}", "--policy", "jacobi"],
    "deep JSON": "evaluate export plain --suite hpsv2 --prompts deep --out o".split(),
    "a module": ["evaluate", "pictures", "plain", "--clip", "tests.fuzz.leaving:f"],
}


@pytest.mark.parametrize("name", CHILDREN)
def test_a_real_process_refuses(name: str, tmp_path: Path) -> None:
    """The commands as users run them, with nothing stubbed; standard input never ends."""
    folder = tmp_path / "case"
    build_world(folder)
    add_nodes(folder)
    (folder / "deep").write_text("[" * 100_000, encoding="utf-8")
    program = [sys.executable, "-m", "mmaccel.cli", *CHILDREN[name]]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with endless() as stdin, (tmp_path / "said").open("wb") as said:
        child = subprocess.Popen(
            program, cwd=folder, env=environment, stdin=stdin, stdout=said, stderr=said
        )
        timer = threading.Timer(60, child.kill)
        timer.start()
        _, status, used = os.wait4(child.pid, 0)
        timer.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)
    text = (tmp_path / "said").read_text(encoding="utf-8")
    assert child.returncode == 2 and "Traceback" not in text, text[-2000:]
    assert text.startswith("mmaccel: ") and "expected" in text
    assert used.ru_maxrss * 1024 < MEMORY


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
