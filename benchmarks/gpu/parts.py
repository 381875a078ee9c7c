"""Running the parts of a check on a GPU one by one: each result is saved as soon as it exists.

The report is a JSON object: `device`, `versions`, `sources` (a digest of the code that was run),
`commit`, `command`, `date`, `left` (parts that the budget left for the next call) and `parts`, by
name. A part holds `status` ("passed" or "failed"), `message` if it failed, `seconds`, `date`, `of`
(device, versions and sources it was run with), and whatever its function returned: `figures` and
`timings` go into the docs, see `tables`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from mmaccel.errors import OptionError
from mmaccel.kernels.device_errors import is_device_error
from mmaccel.outputs.whole_files import write_whole

Report = dict[str, Any]


class CheckError(AssertionError):
    """Some checks of a part failed; `found` holds what there is to keep all the same."""

    def __init__(self, message: str, found: dict[str, Any]) -> None:
        super().__init__(message)
        self.found = found


@dataclass(frozen=True)
class Part:
    """A piece of the check, of a minute at most.

    Attributes:
        name: unique.
        run: takes the device, returns what goes into the report; an exception is a failure.
    """

    name: str
    run: Callable[[torch.device], dict[str, Any]]


def run_parts(
    parts: Sequence[Part],
    file: Path,
    facts: dict[str, Any],
    device: torch.device,
    *,
    only: Sequence[str] = (),
    again: bool = False,
    budget: float = 480.0,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Run what the report at `file` does not hold yet, and write it after every part.

    A part counts as there if it passed with the same device, versions and sources; one that failed
    with these, or did not end, runs again after all others: an error of the device ends a call,
    and must not keep the other parts from ever being run. No part starts after the budget, apart
    from the first.

    Args:
        parts: all there are.
        file: of the report, which need not exist.
        facts: `device`, `versions`, `sources`, `commit` and `command`.
        only: names of the parts to run; all if empty.
        again: run parts that are there as well.
        budget: seconds.

    Returns:
        The report as written.

    Raises:
        OptionError: an unknown name in `only`.
        RuntimeError: an error of the device, after which nothing that it computes can be trusted;
            it is in the report.
    """
    names = [part.name for part in parts]
    for name in only:
        if name not in names:
            raise OptionError(f"part: expected one of {', '.join(names)}, received {name!r}")
    report = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    done = dict(report.get("parts", {}))
    origin = {key: facts[key] for key in ("device", "versions", "sources")}
    todo = [
        part
        for part in parts
        if (part.name in only or not only) and (again or not _is_there(done, part.name, origin))
    ]
    todo.sort(key=lambda part: _has_failed(done, part.name, origin))
    started = clock()
    for number, part in enumerate(todo):
        if number and clock() - started >= budget:
            break
        began, at = clock(), _now()
        ran = {earlier.name for earlier in todo[: number + 1]}
        later = {part.name for part in todo[number + 1 :]}
        lacking = {name for name in names if not _is_there(done, name, origin)} - ran
        left = [name for name in names if name in later | lacking]
        if not _is_there(done, part.name, origin):  # who is killed says no more
            begun = {"of": origin, "seconds": 0.0, "date": at, "status": "failed"}
            begun["message"] = "it began and did not end"
            write_report(
                file, {**facts, "date": at, "left": left, "parts": done | {part.name: begun}}
            )
        result, error = attempt(part, device)
        done[part.name] = {"of": origin, "seconds": clock() - began, "date": at} | result
        report = {**facts, "date": _now(), "left": left, "parts": done}
        write_report(file, report)
        print(f"{part.name}: {result['status']}, {clock() - began:.1f} s", flush=True)
        if error is not None and is_device_error(error):
            raise error
        error = None  # its trace holds a part's tensors
    return report


def failed_parts(report: Report) -> list[str]:
    """Names of the parts whose last run failed."""
    found = report.get("parts", {}).items()
    return [name for name, part in found if part["status"] == "failed"]


def write_report(file: Path, report: Report) -> None:
    """Write a report so that a reader sees the old one or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1) + "\n"
    write_whole(file, lambda path: path.write_text(text, encoding="utf-8"))


def attempt(part: Part, device: torch.device) -> tuple[dict[str, Any], Exception | None]:
    """Run a part; what goes into the report, and the error if it failed."""
    try:
        found = part.run(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what went wrong in this part is this part's
    except CheckError as error:
        return {"status": "failed", "message": str(error), **error.found}, error
    except Exception as error:  # saved in the report, and the exit status says so
        message = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        return {"status": "failed", "message": message}, error
    return {"status": "passed", **found}, None


def _is_there(done: dict[str, Any], name: str, origin: dict[str, Any]) -> bool:
    part = done.get(name, {})
    return part.get("status") == "passed" and part.get("of") == origin


def _has_failed(done: dict[str, Any], name: str, origin: dict[str, Any]) -> bool:
    part = done.get(name, {})
    return part.get("status") == "failed" and part.get("of") == origin


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
