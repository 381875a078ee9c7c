"""The sources: which file a module is, and what it imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
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


@cache
def parse(source: str) -> ast.Module:
    """The syntax tree of a source, which many tests walk over."""
    return ast.parse(source)


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

    walk(parse(source), True)
    return found


_NAME = re.compile(r"(mmaccel(?:\.\w+)+)[.:]?\w*")


def resolved_imports(source: str, known: Collection[str]) -> set[str]:
    """The modules that a source imports by statements, out of `known`, but for annotations alone.

    `from a import b` is module `a.b` where there is one, and else module `a`.
    """
    found: set[str | None] = set()
    tree = parse(source)
    for_annotations = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in for_annotations:
            continue
        if isinstance(node, ast.Import):
            found |= {_module_of(alias.name, known) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {_module_of(f"{node.module}.{alias.name}", known) for alias in node.names}
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
