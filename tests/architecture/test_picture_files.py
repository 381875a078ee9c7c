"""Picture files are opened in one place, which limits formats and sizes."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import ROOT, modules, parse


def openings(source: str) -> list[int]:
    """Lines that open pictures by Pillow."""
    found = []
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node).endswith("Image.open"):
            found.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module == "PIL.Image":
            found += [node.lineno for name in node.names if name.name == "open"]
    return found


def test_one_function_opens_pictures() -> None:
    files = list(modules().values())
    for folder in ("scripts", "benchmarks", "examples"):
        files += (ROOT / folder).rglob("*.py")
    found = {}
    for file in files:
        if lines := openings(file.read_text(encoding="utf-8")):
            found[str(file.relative_to(ROOT))] = len(lines)
    assert found == {"pipelines/hosts/loading/pictures.py": 1}


@pytest.mark.parametrize("source", ["import PIL\nPIL.Image.open(f)", "from PIL.Image import open"])
def test_an_opening_is_found(source: str) -> None:
    assert len(openings(source)) == 1
