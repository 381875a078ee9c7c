"""The sources: which file a module is, and what it imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# folders at the top of the repository that are installed inside mmaccel
TOP_FOLDERS = ("kernels", "tokenizers_vq", "samplers", "pipelines")


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    """What a process of its own does, at the top of the repository."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Import:
    """One import statement.

    Attributes:
        target: the module that it names.
        line: its own.
        at_import: whether importing its file runs it.
        names: the module, or what is taken out of it, with dots.
        for_types: whether type checkers alone read it.
    """

    target: str
    line: int
    at_import: bool
    names: tuple[str, ...]
    for_types: bool


def modules() -> dict[str, Path]:
    """Import name -> file, of all modules of the library."""
    found = {}
    for top in ("mmaccel", *TOP_FOLDERS):
        for file in sorted((ROOT / top).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join(parts if top == "mmaccel" else ("mmaccel", *parts))] = file
    return found


@cache
def parse(source: str) -> ast.Module:
    """The syntax tree of a source, which many tests walk over."""
    return ast.parse(source)


def imports(source: str) -> list[Import]:
    """All imports of a module, those in functions and for type checkers included."""
    found: list[Import] = []

    def walk(node: ast.AST, at_import: bool, for_types: bool) -> None:
        for child in ast.iter_child_nodes(node):
            where = at_import, for_types
            if isinstance(child, ast.Import):
                for alias in child.names:
                    found.append(
                        Import(alias.name, child.lineno, at_import, (alias.name,), for_types)
                    )
            elif isinstance(child, ast.ImportFrom):
                name = "." * child.level + (child.module or "")
                taken = tuple(f"{name}.{alias.name}" for alias in child.names)
                found.append(Import(name, child.lineno, at_import, taken, for_types))
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                where = False, for_types
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                where = False, True
            walk(child, *where)

    walk(parse(source), True, False)
    return found


_NAME = re.compile(r"(mmaccel(?:\.\w+)+)[.:]?\w*")


def resolved_imports(source: str, known: Collection[str]) -> set[str]:
    """The modules that a source imports by statements, out of `known`, but for annotations alone.

    `from a import b` is module `a.b` where there is one, and else module `a`.
    """
    taken = [name for each in imports(source) if not each.for_types for name in each.names]
    found = {_module_of(name, known) for name in taken}
    return {name for name in found if name is not None}


@cache
def named_in_strings(source: str, known: frozenset[str]) -> frozenset[str]:
    """What strings of a source name: modules out of `known`, and folders with some of them.

    A string may go on with a dot, with a name in the module, or with a colon and a name.
    """
    found = set()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = _NAME.fullmatch(node.value)
            if match is None:
                continue
            name = match.group(1)
            if name not in known and _module_of(name, known) != "mmaccel":
                name = _module_of(name, known) or name
            if name in known or any(other.startswith(f"{name}.") for other in known):
                found.add(name)
    return frozenset(found)


def _module_of(name: str, known: Collection[str]) -> str | None:
    """The module that a dotted name is, or lies in."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None
