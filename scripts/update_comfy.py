"""Write what is made from the table of nodes: the example workflows and the table in
docs/comfyui.md; with --check, only compare.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mmaccel.comfy.workflows import generated_files

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Returns 1 if `--check` found a file that differs."""
    stale = []
    for name, text in generated_files(ROOT).items():
        file = ROOT / name
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
    print(*stale, sep="\n")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
