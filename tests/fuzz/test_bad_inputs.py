"""More than a thousand generated bad inputs over all commands and kinds of files.

No case may end in a traceback, hang, exit with an undocumented code, write outside its folder, run
code of an input, print what steers a terminal, or take gigabytes. A case is a seed; a failure
prints the command that builds and runs it again.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.fuzz.cases import build_case
from tests.fuzz.harness import Watch, forget_peak, peak_memory, run_case, stub_work
from tests.fuzz.world import build_models, build_world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, makes FIFOs"),
]
CASES, PARTS = 1200, 6
SECONDS = 300  # of all cases, on one slow core
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
def _stubbed() -> None:  # of all tests here
    with pytest.MonkeyPatch.context() as patch:
        stub_work(patch)
        yield


@pytest.mark.parametrize("part", range(PARTS))
def test_no_input_does_harm(part: int, models: Path, watch: Watch, tmp_path: Path) -> None:
    template, failures, began = tmp_path / "template", [], time.perf_counter()
    build_world(template)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "models").symlink_to(models)
    patch = pytest.MonkeyPatch()
    for name in ("TMPDIR", "MPLCONFIGDIR"):
        patch.setenv(name, str(tmp_path / "run"))
    forget_peak()
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
    assert not failures, f"{len(failures)} complaints:\n" + "\n".join(failures)
    assert peak_memory() < MEMORY
    assert time.perf_counter() - began < SECONDS / PARTS
