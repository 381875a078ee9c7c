"""docs/first-day.md: each step with what was typed and what was printed, abridged."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

from scripts.first_day.runner import Done
from scripts.first_day.step import Run, Step

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


def write_page(steps: Sequence[Step], done: Mapping[int, Sequence[Done]]) -> str:
    """The page.

    Args:
        steps: all of them.
        done: runs by the number of the step, from 1.
    """
    parts = [_HEAD, "| | what somebody does | what the message says |", "| --- | --- | --- |"]
    for number, step in enumerate(steps, 1):
        parts.append(f"| {number} | [{step.title}](#{_slug(step.title)}) | {_cell(step.remedy)} |")
    parts.append("")
    for number, step in enumerate(steps, 1):
        parts.append(f"### {step.title}\n")
        for file, text in step.files.items():
            shown = _shorten(text.strip("\n"))
            parts.append(f"`{file}`:\n\n```text\n{shown}\n```\n")
        if step.server:
            parts.append(f"In another terminal: `{_command(step.server)}`\n")
        for each in done[number]:
            parts.append(_block(each))
    return "\n".join(parts).rstrip("\n") + "\n"


def _block(done: Done) -> str:
    """A command and its output, or a program and its output."""
    printed = clean_output(done.output, done.run)
    printed += f"\n[exit status {done.code}]" if done.code else ""
    if done.run.is_python:
        return f"```python\n{_command(done.run.text)}\n```\n\n```text\n{printed}\n```\n"
    stopped = "\n^C" if done.run.stop_at else ""
    return f"```console\n$ {_command(done.run.text)}{stopped}\n{printed}\n```\n"


def _slug(title: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\s-]", "", title).lower().replace(" ", "-")


def _command(text: str) -> str:
    return text.replace("{port}", "8000")


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def clean_output(output: str, run: Run) -> str:
    """An output without what differs from machine to machine, wrapped and shortened."""
    lines = [line.split("\r")[-1].rstrip() for line in output.splitlines()]
    lines = [line for line in lines if line and not re.search(r"━|\d+%\||it/s\]|─", line)]
    if run.is_python and run.code:  # of a traceback, the error
        lines = lines[-1:]
    text = re.sub(r"(/[\w.+-]+)+/site-packages", "…", "\n".join(lines))
    text = re.sub(r"(/[\w.+-]+)+/(work|home)\b", "…", text)
    text = re.sub(r"\b\d+\.\d+ (m?s)\b", r"… \1", text)
    text = re.sub(r"\b\d+\.\d+ times as fast", "… times as fast", text)
    text = re.sub(r"(\d\.\d\d +)\d+\.\d\d( +)\d+\.\d\d( +\S+ +bitwise)", r"\1…   \2…   \3", text)
    text = re.sub(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+", "…", text)  # of a log
    text = re.sub(r"(http://127\.0\.0\.1:)(?!8000)\d+", r"\1…", text)
    text = re.sub(r"\b\d+(, drawn.* --seed )\d+", r"…\1…", text)
    text = re.sub(r"(?<![\d.])\d{5,10}(-[a-z][^\s/]*\.(png|wav|json))", r"…\1", text)
    return _shorten("\n".join(map(_wrap, text.splitlines())))


def _wrap(line: str) -> str:
    return textwrap.fill(line, _WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def _shorten(text: str) -> str:
    lines = text.splitlines()
    kept = lines if len(lines) <= _MAX_LINES else [*lines[:7], "…", *lines[-5:]]
    return "\n".join(line[:400] for line in kept)
