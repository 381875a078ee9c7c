"""Does what people do on their first day, and writes what was printed to docs/first-day.md.

    python -m scripts.first_day                    in a new environment: builds a wheel, installs it
    python -m scripts.first_day --python PATH      in the environment of this Python
    python -m scripts.first_day --only 3 14-16     these steps alone

Run it in the repository. Each step has an empty folder, a home of its own and no network but a hub
on localhost. It ends with 1 if a step does not do what `steps.py` says; the page is written when
all are done.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.first_day.runner import ROOT, Done, StepError, make_environment, open_runner
from scripts.first_day.step import Run, Step
from scripts.first_day.steps import STEPS

PAGE = ROOT / "docs" / "first-day.md"
_MAX_LINES = 14  # of an output
_WIDTH = 100
_HEAD = """# The first day

What people do on their first day, and the mistakes that they make: what was typed, and what was
printed. `python -m scripts.first_day` builds a wheel, installs it in a new environment, does all of
this there in empty folders, and writes this page. It fails where something else is printed, and
where the remedy that a message names does not work. The only network is a hub on localhost, which
has `own/…` and, under the names of other models, tiny stand-ins; the machine has no GPU. Outputs
are abridged: `…` stands for lines, folders, drawn seeds and seconds.
"""
_VARYING = {  # what differs from machine to machine
    r"(/[\w.+-]+)+/site-packages": "…",
    r"(/[\w.+-]+)+/(work|home)\b": "…",
    r"\b\d+\.\d+ (m?s)\b": r"… \1",
    r"\b\d+\.\d+ times as fast": "… times as fast",
    r"(\d\.\d\d +)\d+\.\d\d( +)\d+\.\d\d( +\S+ +bitwise)": r"\1…   \2…   \3",
    r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+": "…",  # of a log
    r"(http://127\.0\.0\.1:)(?!8000)\d+": r"\1…",
    r"\b\d+(, drawn.* --seed )\d+": r"…\1…",
    r"(?<![\d.])\d{5,10}(-[a-z][^\s/]*\.(png|wav|json))": r"…\1",
}


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
    done: dict[int, list[Done]] = {}
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
                        done[number] = runner.run(step, f"{number:02}")
                        state = f"{time.monotonic() - began:5.1f} s"
                    except StepError as error:
                        failed.append(number)
                        state = f"FAILED: {error}\n   "
                print(f"{number:2}  {state}  {step.title}", flush=True)
    print(f"{len(done)} of {len(STEPS)} done, {len(failed)} failed: {failed}")
    if len(done) == len(STEPS):
        PAGE.write_text(write_page(STEPS, done), encoding="utf-8")
        print(f"written: {PAGE.relative_to(ROOT)}")
    return int(bool(failed))


def write_page(steps: Sequence[Step], done: Mapping[int, Sequence[Done]]) -> str:
    """The page: each step with what was typed and what was printed, abridged.

    Args:
        steps: all of them.
        done: runs by the number of the step, from 1.
    """
    parts = [_HEAD, "| | what somebody does | what the message says |", "| --- | --- | --- |"]
    for number, step in enumerate(steps, 1):
        slug = re.sub(r"[^\w\s-]", "", step.title).lower().replace(" ", "-")
        remedy = step.remedy.replace("|", r"\|")
        parts.append(f"| {number} | [{step.title}](#{slug}) | {remedy} |")
    parts.append("")
    for number, step in enumerate(steps, 1):
        parts.append(f"### {step.title}\n")
        for file, text in step.files.items():
            shown = _shorten(text.strip("\n"))
            parts.append(f"`{file}`:\n\n```text\n{shown}\n```\n")
        if step.server:
            parts.append(f"In another terminal: `{step.server}`\n")
        parts += map(_block, done[number])
    return "\n".join(parts).rstrip("\n").replace("{port}", "8000") + "\n"


def _block(done: Done) -> str:
    """A command and its output, or a program and its output."""
    printed = clean_output(done.output, done.run)
    printed += f"\n[exit status {done.code}]" if done.code else ""
    if done.run.is_python:
        return f"```python\n{done.run.text}\n```\n\n```text\n{printed}\n```\n"
    stopped = "\n^C" if done.run.stop_at else ""
    return f"```console\n$ {done.run.text}{stopped}\n{printed}\n```\n"


def clean_output(output: str, run: Run) -> str:
    """An output without what differs from machine to machine, wrapped and shortened."""
    lines = [line.split("\r")[-1].rstrip() for line in output.splitlines()]
    lines = [line for line in lines if line and not re.search(r"━|\d+%\||it/s\]|─", line)]
    if run.is_python and run.code:  # of a traceback, the error
        lines = lines[-1:]
    text = "\n".join(lines)
    for pattern, shown in _VARYING.items():
        text = re.sub(pattern, shown, text)
    wrapped = {"subsequent_indent": "    ", "break_on_hyphens": False}
    return _shorten("\n".join(textwrap.fill(x, _WIDTH, **wrapped) for x in text.splitlines()))  # type: ignore[arg-type]


def _shorten(text: str) -> str:
    lines = text.splitlines()
    kept = lines if len(lines) <= _MAX_LINES else [*lines[:7], "…", *lines[-5:]]
    return "\n".join(line[:400] for line in kept)


if __name__ == "__main__":
    sys.exit(main())
