"""Write the tables in README.md and docs/ from benchmarks/results/ and from the catalog, and the
names for type checkers; with --check, only compare.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mmaccel  # noqa: E402
from benchmarks.report import fill_tables, read_reports  # noqa: E402


def stub() -> str:
    """`mmaccel/__init__.pyi`: the public names for type checkers."""
    modules = {name: getattr(mmaccel, name).__module__ for name in mmaccel.__all__[1:]}
    imports = sorted(f"from {module} import {name}" for name, module in modules.items())
    names = [f'    "{name}",' for name in mmaccel.__all__]
    head = '"""The public names for type checkers, written by scripts/update_docs.py."""'
    return "\n".join([head, "", *imports, "", "__version__: str", "__all__ = [", *names, "]", ""])


def main() -> int:
    """Returns 1 if `--check` found a page that differs from its source."""
    reports = read_reports(ROOT / "benchmarks" / "results")
    stale = []
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    files = {page: fill_tables(page.read_text(encoding="utf-8"), reports) for page in pages}
    files[ROOT / "mmaccel" / "__init__.pyi"] = stub()
    for file, text in files.items():
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(file.relative_to(ROOT))
            if "--check" not in sys.argv:
                file.write_text(text, encoding="utf-8")
    print(*stale, sep="\n")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
