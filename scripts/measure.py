"""Measure again what benchmarks/results/ holds, and write the tables of README.md and docs/.

    python scripts/measure.py                       # everything this machine can run
    python scripts/measure.py scenes-cpu-batch1     # results of these names
    python scripts/measure.py --list

Each result names the command that made it; that command is run again and writes the same file,
which then keeps what tables show, a row a line, without each question's records.
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
sys.path.insert(0, str(ROOT))

from benchmarks.rows import write_report  # noqa: E402

RAW = ("records", "sessions", "tasks", "kinds")  # of each question and run, for resuming


def recorded(folder: Path) -> dict[Path, list[str]]:
    """Files of results, and the commands that made them.

    Results of GPUs are left out (`scripts/gpu_check.py` makes them), and so are the reference runs,
    which record what the code made and are compared, not measured (`benchmarks/reference_runs.py`).

    Raises:
        SystemExit: a result that does not say how it was made.
    """
    found = {}
    for file in sorted(folder.glob("*.json")):
        if file.stem.startswith("gpu-") or file.stem == "reference_runs":
            continue
        command = shlex.split(json.loads(file.read_text(encoding="utf-8")).get("command", ""))
        if command[:1] not in (["mmaccel"], ["python"]):
            raise SystemExit(f"{file.name}: expected the command that made it, found {command!r}")
        found[file] = command
    return found


def trim(file: Path) -> None:
    """Leave out what no table shows."""
    report = json.loads(file.read_text(encoding="utf-8"))
    write_report(file, {key: value for key, value in report.items() if key not in RAW})


def main() -> int:
    """Returns 1 if a command failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="results, without .json")
    parser.add_argument("--list", action="store_true", help="print the commands, run none")
    options = parser.parse_args()
    commands = recorded(RESULTS)
    known = [file.stem for file in commands]
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"expected names out of {', '.join(known)}, received {', '.join(unknown)}")
    failed = []
    for file, command in commands.items():
        if options.names and file.stem not in options.names:
            continue
        print(f"{file.stem}: {shlex.join(command)}", flush=True)
        if options.list:
            continue
        own = ["-m", "mmaccel.cli"] if command[0] == "mmaccel" else []  # this checkout's
        if subprocess.run([sys.executable, *own, *command[1:]], cwd=ROOT).returncode:
            failed.append(file.stem)
        else:
            trim(file)
    if not options.list:
        subprocess.run([sys.executable, "scripts/update_docs.py"], cwd=ROOT, check=True)
    if failed:
        print(f"failed: {', '.join(failed)}; their results are the old ones", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
