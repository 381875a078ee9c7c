"""How large the repository is: tokens of code and lines of docstrings, by folder.

Tokens are Python's own, without comments, docstrings and layout, so that squeezing lines gains
nothing. `docs/size.json` holds the most that a folder may have; a number goes up only in a commit
that says for which capability.

    python scripts/size.py            prints the table
    python scripts/size.py --check    fails where a folder is above its number
    python scripts/size.py --lower    lowers the numbers to today's sizes, in hundreds
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = ROOT / "docs" / "size.json"
_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
# from Python 3.12 on an f-string is many tokens; counted is its end, as the one that it was
_STARTS, _ENDS = (
    {getattr(tokenize, f"{kind}_{end}", None) for kind in ("FSTRING", "TSTRING")} - {None}
    for end in ("START", "END")
)

Size = dict[str, int]


def measure(text: str) -> Size:
    """Tokens of code and lines of docstrings of a module."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):  # a string alone: a docstring, or a field's
                lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
    tokens = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        depth += (token.type in _STARTS) - (token.type in _ENDS)
        tokens += depth == 0 and token.type not in _LAYOUT and token.start[0] not in lines
    return {"tokens": tokens, "docstrings": len(lines)}


def measure_folders(root: Path, folders: list[str]) -> dict[str, Size]:
    """Sizes of folders; a file counts in the deepest folder that holds it."""
    sizes = {folder: Counter(tokens=0, docstrings=0) for folder in folders}
    for file in root.rglob("*.py"):
        path = file.relative_to(root).as_posix()
        holders = [folder for folder in folders if path.startswith(f"{folder}/")]
        if holders:
            sizes[max(holders, key=len)].update(measure(file.read_text(encoding="utf-8")))
    return {folder: dict(size) for folder, size in sizes.items()}


def find_excesses(sizes: dict[str, Size], budget: dict[str, Size]) -> list[str]:
    """What is above its number."""
    return [
        f"{folder}: expected at most {most} {what}, received {sizes[folder][what]}; delete "
        "something, or raise the number in a commit that says for which capability"
        for folder, limits in budget.items()
        for what, most in limits.items()
        if sizes[folder][what] > most
    ]


def read_budget() -> dict[str, Size]:
    """The most that every folder may have."""
    budget: dict[str, Size] = json.loads(BUDGET.read_text(encoding="utf-8"))
    return budget


def make_table(sizes: dict[str, Size]) -> str:
    """A row for each folder, in Markdown."""
    rows = [f"| {name} | {s['tokens']:,} | {s['docstrings']:,} |" for name, s in sizes.items()]
    total = Counter[str]()
    for size in sizes.values():
        total.update(size)
    rows.append(f"| all | {total['tokens']:,} | {total['docstrings']:,} |")
    head = ["| folder | tokens of code | lines of docstrings |", "| --- | ---: | ---: |"]
    return "\n".join([*head, *rows])


def main() -> int:
    """Returns 1 if `--check` found a folder above its number."""
    budget = read_budget()
    sizes = measure_folders(ROOT, list(budget))
    if "--lower" in sys.argv:
        lower = {
            folder: {
                what: min(most, -(-sizes[folder][what] // 100) * 100)
                for what, most in limits.items()
            }
            for folder, limits in budget.items()
        }
        rows = [f"  {json.dumps(folder)}: {json.dumps(limits)}" for folder, limits in lower.items()]
        BUDGET.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    excesses = find_excesses(sizes, budget) if "--check" in sys.argv else []
    print("\n".join(excesses) if "--check" in sys.argv else make_table(sizes))
    return int(bool(excesses))


if __name__ == "__main__":
    sys.exit(main())
