"""The steps of scripts/first_day: what people do on their first day, and what helps."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.first_day.runner import Runner, StepError, open_runner
from scripts.first_day.step import Step, shell
from scripts.first_day.steps import STEPS
from tests.architecture.source import ROOT

QUICK = ("I type mmaccel and press Enter", "I install the nodes a second time")
INSTALLS = "pip install -q"


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    folder = tmp_path_factory.mktemp("first-day")
    with open_runner(Path(sys.executable), folder, {"PYTHONPATH": str(ROOT)}) as opened:
        yield opened


def do(step: Step, runner: Runner) -> None:
    if not runner.is_possible(step):
        pytest.skip("the environment has what this step lacks, or lacks what it needs")
    runner.run(step, str(STEPS.index(step)))


@pytest.mark.parametrize("title", QUICK)
def test_a_quick_step(title: str, runner: Runner) -> None:
    do(next(step for step in STEPS if step.title == title), runner)


# two of them: all of them take minutes, and the script runs them where a release is made
@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [step for step in STEPS[2::24] if step.title not in QUICK],
    ids=lambda step: step.title.replace(" ", "-"),
)
def test_a_step(step: Step, runner: Runner) -> None:
    if step.then is not None and INSTALLS in step.then.text:
        pytest.skip("it installs a package")
    do(step, runner)


def test_every_mistake_has_a_remedy_that_is_carried_out() -> None:
    assert len(STEPS) >= 40 and len({step.title for step in STEPS}) == len(STEPS)
    mistakes = [step for step in STEPS if step.remedy]
    assert len(mistakes) >= 25
    for step in STEPS:
        assert bool(step.remedy) <= (step.then is not None and step.then.code == 0), step.title
        assert bool(step.run.code) <= bool(step.remedy) or step is STEPS[0], step.title


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (Step("a", shell("echo red; exit 3", "red")), "exit status 3, not 0"),
        (Step("b", shell("echo red", "blue")), "nothing like 'blue'"),
        (Step("c", shell("echo red; exit 2", "red", 2), "write blue"), "the remedy 'write blue'"),
    ],
)
def test_a_step_that_does_another_thing_fails(step: Step, said: str, tmp_path: Path) -> None:
    with pytest.raises(StepError, match=re.escape(said)):
        Runner(Path(sys.executable), tmp_path, "").run(step, step.title)
