"""Does what people do on their first day, and writes what was printed to docs/first-day.md.

    python -m scripts.first_day                    in a new environment: builds a wheel, installs it
    python -m scripts.first_day --python PATH      in the environment of this Python
    python -m scripts.first_day --only 3 14-16     these steps alone
    python -m scripts.first_day --results FILE     notes what is done in FILE, and does the rest

Run it in the repository. Each step has an empty folder, a home of its own and no network but a hub
on localhost. It ends with 1 if a step does not do what `steps.py` says; the page is written when
all are done. A file of results is for one version of the library: remove it after a change.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from scripts.first_day.environment import ROOT, make_environment
from scripts.first_day.page import write_page
from scripts.first_day.runner import Done, StepError, open_runner
from scripts.first_day.step import Step
from scripts.first_day.steps import STEPS

PAGE = ROOT / "docs" / "first-day.md"


def main() -> int:
    """Returns 1 if a step failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, help="of an environment with mmaccel")
    parser.add_argument("--only", nargs="+", default=[], help="numbers of steps, or spans of them")
    parser.add_argument("--results", type=Path, help="of the steps that are done")
    options = parser.parse_args()
    only = set(_numbers(options.only))
    failed, left_out = [], []
    done = _read(options.results)
    with tempfile.TemporaryDirectory(prefix="first-day-") as name:
        folder = Path(name)
        python = options.python or make_environment(folder)
        with open_runner(python.absolute(), folder) as runner:
            for number, step in enumerate(STEPS, 1):
                if number in done or (only and number not in only):
                    continue
                if not runner.is_possible(step):
                    left_out.append(number)
                    print(f"{number:2}  left out  {step.title}", flush=True)
                    continue
                began = time.monotonic()
                try:
                    done[number] = runner.run(step, f"{number:02}")
                    state = f"{time.monotonic() - began:5.1f} s"
                    _note(options.results, step, done[number])
                except StepError as error:
                    failed.append(number)
                    state = f"FAILED: {error}\n   "
                print(f"{number:2}  {state}  {step.title}", flush=True)
    print(f"{len(done)} done, {len(left_out)} left out, {len(failed)} failed: {failed}")
    if len(done) == len(STEPS):
        PAGE.write_text(write_page(STEPS, done), encoding="utf-8")
        print(f"written: {PAGE.relative_to(ROOT)}")
    return int(bool(failed))


def _note(results: Path | None, step: Step, done: list[Done]) -> None:
    """Add a line to the file of results."""
    if results is not None:
        runs = [[each.output, each.code] for each in done]
        with results.open("a", encoding="utf-8") as opened:
            print(json.dumps({"step": repr(step), "runs": runs}), file=opened)


def _read(results: Path | None) -> dict[int, list[Done]]:
    """What a file of results has about the steps as they are now, by number."""
    if results is None or not results.exists():
        return {}
    lines = map(json.loads, results.read_text(encoding="utf-8").splitlines())
    noted = {line["step"]: line["runs"] for line in lines}
    return {
        number: [
            Done(run, output, code)
            for run, (output, code) in zip(filter(None, (step.run, step.then)), noted[repr(step)])
        ]
        for number, step in enumerate(STEPS, 1)
        if repr(step) in noted
    }


def _numbers(texts: Iterable[str]) -> Iterable[int]:
    for text in texts:
        first, _, last = text.partition("-")
        yield from range(int(first), int(last or first) + 1)


if __name__ == "__main__":
    sys.exit(main())
