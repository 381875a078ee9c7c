"""Measure again what benchmarks/results/ holds, and write the tables of README.md and docs/.

    python scripts/measure.py                       # everything this machine can run
    python scripts/measure.py scenes-cpu-batch1     # results of these names
    python scripts/measure.py --list

Each result names the command that made it; that command is run again and writes the same file.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def recorded(folder: Path) -> dict[str, list[str]]:
    """Commands that made results, by the results' names.

    Results of GPUs are left out (`scripts/gpu_check.py` makes them), and so are the reference runs,
    which record what the code made and are compared, not measured (`benchmarks/reference_runs.py`).

    Raises:
        SystemExit: a result that does not say how it was made.
    """
    found = {}
    for file in sorted([*folder.glob("*.json"), *folder.glob("*/speed.json")]):
        name = file.stem if file.parent == folder else file.parent.name
        if name.startswith("gpu-") or name == "reference_runs":
            continue
        command = shlex.split(json.loads(file.read_text(encoding="utf-8")).get("command", ""))
        if command[:1] not in (["mmaccel"], ["python"]):
            raise SystemExit(f"{file.name}: expected the command that made it, found {command!r}")
        found[name] = command
    return found


def with_this_python(command: list[str]) -> list[str]:
    """A recorded command for this interpreter and this checkout."""
    own = ["-m", "mmaccel.cli"] if command[0] == "mmaccel" else []
    return [sys.executable, *own, *command[1:]]


def main() -> int:
    """Returns 1 if a command failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="results, without .json")
    parser.add_argument("--list", action="store_true", help="print the commands, run none")
    options = parser.parse_args()
    commands = recorded(RESULTS)
    unknown = [name for name in options.names if name not in commands]
    if unknown:
        parser.error(f"expected names out of {', '.join(commands)}, received {', '.join(unknown)}")
    failed = []
    for name, command in commands.items():
        if options.names and name not in options.names:
            continue
        print(f"{name}: {shlex.join(command)}", flush=True)
        if not options.list and subprocess.run(with_this_python(command), cwd=ROOT).returncode:
            failed.append(name)
    if not options.list:
        subprocess.run([sys.executable, "scripts/update_docs.py"], cwd=ROOT, check=True)
    if failed:
        print(f"failed: {', '.join(failed)}; their results are the old ones", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
