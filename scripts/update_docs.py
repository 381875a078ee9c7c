"""Write the tables in README.md and docs/ from benchmarks/results/; with --check, only compare."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.report import fill_tables, read_reports  # noqa: E402


def main() -> int:
    """Returns 1 if `--check` found a page that differs from the results."""
    reports = read_reports(ROOT / "benchmarks" / "results")
    stale = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        filled = fill_tables(text, reports)
        if filled != text:
            stale.append(page.relative_to(ROOT))
            if "--check" not in sys.argv:
                page.write_text(filled, encoding="utf-8")
    print(*stale, sep="\n")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
