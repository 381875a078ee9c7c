"""Does what people do on their first day, and carries out the remedies that messages name.

    python -m scripts.first_day                    in a new environment: builds a wheel, installs it
    python -m scripts.first_day --python PATH      in the environment of this Python
    python -m scripts.first_day --only 3 14-16     these steps alone

Run it in the repository. Each step has an empty folder, a home of its own and no network but a hub
on localhost. It ends with 1 if a step does not do what `steps.py` says.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from scripts.first_day.runner import StepError, make_environment, open_runner
from scripts.first_day.steps import STEPS


def main() -> int:
    """Returns 1 if a step failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, help="of an environment with mmaccel")
    parser.add_argument("--only", nargs="+", default=[], help="numbers of steps, or spans of them")
    options = parser.parse_args()
    only: set[int] = set()
    for text in options.only:
        first, _, last = text.partition("-")
        only.update(range(int(first), int(last or first) + 1))
    failed: list[int] = []
    n_done = 0
    with tempfile.TemporaryDirectory(prefix="first-day-") as name:
        folder = Path(name)
        python = options.python or make_environment(folder)
        with open_runner(python.absolute(), folder) as runner:
            for number, step in enumerate(STEPS, 1):
                if only and number not in only:
                    continue
                began, state = time.monotonic(), "left out"
                if runner.is_possible(step):
                    try:
                        runner.run(step, f"{number:02}")
                        n_done += 1
                        state = f"{time.monotonic() - began:5.1f} s"
                    except StepError as error:
                        failed.append(number)
                        state = f"FAILED: {error}\n   "
                print(f"{number:2}  {state}  {step.title}", flush=True)
    print(f"{n_done} of {len(STEPS)} done, {len(failed)} failed: {failed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
