"""No tensor takes its dtype from `torch.set_default_dtype`, which other threads change."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import modules, parse

MAKERS = frozenset(
    "empty zeros ones full rand randn tensor arange linspace logspace eye normal hann_window "
    "empty_strided scalar_tensor Tensor".split()
)


def find_undeclared(source: str) -> list[str]:
    """Calls that make a tensor of the default dtype, or may."""
    found = []
    for node in ast.walk(parse(source)):
        if not isinstance(node, ast.Call):
            continue
        _, _, name = ast.unparse(node.func).rpartition("torch.")
        numbers = [isinstance(argument, ast.Constant) for argument in node.args[1:]]
        if name == "arange":  # whole numbers make int64
            inside = [*map(ast.walk, node.args)]
            is_whole = not any(
                isinstance(part, ast.Div)
                or (isinstance(part, ast.Constant) and isinstance(part.value, float))
                for parts in inside
                for part in parts
            )
        else:
            is_whole = name not in MAKERS and not (name == "where" and numbers == [True, True])
        if not is_whole and "dtype" not in {keyword.arg for keyword in node.keywords}:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_every_tensor_is_made_with_a_dtype() -> None:
    sources = {name: file.read_text(encoding="utf-8") for name, file in modules().items()}
    undeclared = {name: find_undeclared(source) for name, source in sources.items()}
    assert {name: calls for name, calls in undeclared.items() if calls} == {}


@pytest.mark.parametrize(
    ("call", "is_found"),
    [
        ("torch.empty(2, device='cpu')", True),
        ("torch.tensor([])", True),
        ("torch.arange(0, 1, 0.5)", True),
        ("torch.arange(n / 2)", True),
        ("torch.where(mask, 0.5, 1)", True),
        ("torch.Tensor(2, 3)", True),
        ("torch.arange(n // 2, device=x.device)", False),
        ("torch.zeros(2, dtype=torch.bool)", False),
        ("x.new_zeros(2)", False),
        ("torch.zeros_like(x)", False),
        ("torch.where(mask, x, 0.0)", False),
    ],
)
def test_what_is_found(call: str, is_found: bool) -> None:
    assert bool(find_undeclared(call)) == is_found
