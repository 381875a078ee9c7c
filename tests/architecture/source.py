"""The sources: which file a module is, and what it imports."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# folders at the top of the repository that are installed inside mmaccel
TOP_FOLDERS = ("kernels", "tokenizers_vq", "samplers", "pipelines")


@dataclass(frozen=True)
class Import:
    """One import statement: the module it names, its line, whether importing its file runs it."""

    target: str
    line: int
    at_import: bool


def modules() -> dict[str, Path]:
    """Import name -> file, of all modules of the library."""
    found = {}
    for top in ("mmaccel", *TOP_FOLDERS):
        for file in sorted((ROOT / top).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join(parts if top == "mmaccel" else ("mmaccel", *parts))] = file
    return found


def imports(source: str) -> list[Import]:
    """All imports of a module, those in functions and for type checkers included."""
    found: list[Import] = []

    def walk(node: ast.AST, at_import: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend(Import(a.name, child.lineno, at_import) for a in child.names)
            elif isinstance(child, ast.ImportFrom):
                name = "." * child.level + (child.module or "")
                found.append(Import(name, child.lineno, at_import))
            runs = not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                runs = False
            walk(child, at_import and runs)

    walk(ast.parse(source), True)
    return found
