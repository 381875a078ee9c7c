"""Does what people do on their first day, and writes what was printed to docs/first-day.md.

    python -m scripts.first_day                    in a new environment: builds a wheel, installs it
    python -m scripts.first_day --python PATH      in the environment of this Python
    python -m scripts.first_day --only 3 14-16     these steps alone; the page is left as it is

Run it in the repository. Each step has an empty folder, a home of its own and no network but a hub
on localhost. It ends with 1 if a step does not do what `steps.py` says.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from scripts.first_day.environment import ROOT, make_environment
from scripts.first_day.page import write_page
from scripts.first_day.runner import Done, StepError, open_runner
from scripts.first_day.steps import STEPS

PAGE = ROOT / "docs" / "first-day.md"


def main() -> int:
    """Returns 1 if a step failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, help="of an environment with mmaccel")
    parser.add_argument("--only", nargs="+", default=[], help="numbers of steps, or spans of them")
    options = parser.parse_args()
    only = set(_numbers(options.only))
    failed, left_out, done = [], [], {}
    with tempfile.TemporaryDirectory(prefix="first-day-") as name:
        folder = Path(name)
        python = options.python or make_environment(folder)
        with open_runner(python.absolute(), folder) as runner:
            for number, step in enumerate(STEPS, 1):
                if only and number not in only:
                    continue
                if not runner.is_possible(step):
                    left_out.append(number)
                    print(f"{number:2}  left out  {step.title}", flush=True)
                    continue
                began = time.monotonic()
                try:
                    done[number] = runner.run(step, f"{number:02}")
                    state = f"{time.monotonic() - began:5.1f} s"
                except StepError as error:
                    failed.append(number)
                    state = f"FAILED: {error}\n   "
                print(f"{number:2}  {state}  {step.title}", flush=True)
    print(f"{len(done)} done, {len(left_out)} left out, {len(failed)} failed: {failed}")
    if not only and not failed and not left_out:
        _write(done)
    return int(bool(failed))


def _write(done: dict[int, list[Done]]) -> None:
    PAGE.write_text(write_page(STEPS, done), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")


def _numbers(texts: Iterable[str]) -> Iterable[int]:
    for text in texts:
        first, _, last = text.partition("-")
        yield from range(int(first), int(last or first) + 1)


if __name__ == "__main__":
    sys.exit(main())
