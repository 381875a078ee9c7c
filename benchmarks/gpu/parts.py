"""The record of a check on a GPU: parts run one by one, and each is saved as soon as it is done.

The report is a JSON object: `device`, `versions`, `sources` (a digest of the code that was run),
`commit`, `command`, `date`, `left` (parts that the budget left for the next call) and `parts`, by
name. A part holds `status` ("passed" or "failed"), `message` if it failed, `seconds`, `date`, `of`
(device, versions and sources it was run with), and whatever its function returned: `figures` and
rows go into the docs, see `benchmarks.report`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import write_report
from mmaccel.errors import OptionError
from mmaccel.kernels.device_errors import is_device_error
from mmaccel.outputs.machine import package_version, versions

Report = dict[str, Any]
Part = Callable[[torch.device], dict[str, Any]]
"""What runs on a device; returns what goes into the report, an exception is a failure."""

_SOURCES = (
    "kernels", "tokenizers_vq", "samplers", "pipelines", "mmaccel", "benchmarks/gpu",
    "tests/kernels",
)  # fmt: skip


class CheckError(AssertionError):
    """Some checks of a part failed; `found` holds what there is to keep all the same."""

    def __init__(self, message: str, found: dict[str, Any]) -> None:
        super().__init__(message)
        self.found = found


def reason_of(error: Exception) -> str:
    """An error on one line, for a row that says so; one of the device goes on."""
    if is_device_error(error):
        raise error
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def raise_failed(rows: Sequence[dict[str, Any]], what: str, found: dict[str, Any]) -> None:
    """Raise a `CheckError` that names the rows with something `wrong`, if there are any."""
    failed = {row["name"]: row["wrong"] for row in rows if row["wrong"]}
    if failed:
        named = "; ".join(f"{name}: {wrong}" for name, wrong in failed.items())
        message = f"{len(failed)} of {len(rows)} {what} failed: {named}"
        raise CheckError(message, found | {"failed": failed})


def describe(root: Path, device: torch.device, command: str) -> dict[str, Any]:
    """The facts of a report: device, versions, commit and a digest of all sources, which tells code
    that was changed and not committed.
    """
    total = hashlib.sha256()
    for file in sorted(file for folder in _SOURCES for file in (root / folder).rglob("*.py")):
        total.update(f"{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes())
    found = versions() | {"triton": package_version("triton") or "none"}
    name = str(device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        found["CUDA"] = str(torch.version.cuda or torch.version.hip)
        found["driver"] = _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": name,
        "versions": found,
        "sources": total.hexdigest()[:16],
        "commit": _ask("git", "-C", str(root), "rev-parse", "HEAD"),
        "command": command,
    }


def _ask(*command: str) -> str:
    """The first line of a program's answer, or "unknown"."""
    if shutil.which(command[0]) is None:
        return "unknown"
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
    return lines[0].strip() or "unknown"


def run_parts(
    parts: Mapping[str, Part],
    file: Path,
    facts: dict[str, Any],
    device: torch.device,
    *,
    only: Sequence[str] = (),
    again: bool = False,
    budget: float = 480.0,
) -> Report:
    """Run what the report at `file` does not hold yet, and write it after every part.

    A part counts as there if it passed with the same device, versions and sources; one that failed
    with these, or did not end, runs after all others: an error of the device ends a call, and must
    not keep the other parts from ever being run. No part starts after the budget, apart from the
    first.
    """
    for name in only:
        if name not in parts:
            raise OptionError(f"part: expected one of {', '.join(parts)}, received {name!r}")
    report = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    done: dict[str, Any] = report.get("parts", {})
    origin = {key: facts[key] for key in ("device", "versions", "sources")}

    def status(name: str) -> str | None:
        part = done.get(name, {})
        return part["status"] if part.get("of") == origin else None

    todo = [
        name for name in parts if (name in only or not only) and (again or status(name) != "passed")
    ]
    todo.sort(key=lambda name: status(name) == "failed")
    started = time.monotonic()
    for number, name in enumerate(todo):
        if number and time.monotonic() - started >= budget:
            break
        ran, began = todo[: number + 1], time.monotonic()
        left = [
            other
            for other in parts
            if other not in ran and (other in todo or status(other) != "passed")
        ]
        part = {"of": origin, "seconds": 0.0, "date": _now(), "status": "failed"}
        part["message"] = "it began and did not end"  # who is killed says no more
        report = {**facts, "date": part["date"], "left": left, "parts": done | {name: part}}
        if status(name) != "passed":
            write_report(file, report)
        result, error = attempt(parts[name], device)
        seconds = time.monotonic() - began
        done[name] = part | {"message": ""} | result | {"seconds": seconds}
        report |= {"date": _now(), "parts": done}
        write_report(file, report)
        print(f"{name}: {result['status']}, {seconds:.1f} s", flush=True)
        if error is not None and is_device_error(error):
            raise error
        error = None  # its trace holds a part's tensors
    return report


def attempt(part: Part, device: torch.device) -> tuple[dict[str, Any], Exception | None]:
    """Run a part; what goes into the report, and the error if it failed."""
    try:
        found = part(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what went wrong in this part is this part's
    except Exception as error:  # saved in the report, and the exit status says so
        kind = "" if isinstance(error, CheckError) else f"{type(error).__name__}: "
        message = "; ".join([f"{kind}{error}", *getattr(error, "__notes__", ())])
        return getattr(error, "found", {}) | {"status": "failed", "message": message}, error
    return {"status": "passed", **found}, None


def failed_parts(report: Report) -> list[str]:
    """Names of the parts whose last run failed."""
    return [name for name, part in report.get("parts", {}).items() if part["status"] == "failed"]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
