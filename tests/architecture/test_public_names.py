"""The public names: lazy, importable, documented, and the same for type checkers."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import mmaccel
from mmaccel.catalog import (
    CLIP_MODELS,
    MODELS,
    POLICIES,
    SPOKEN_MODELS,
    TEXT_MODELS,
    VISION_MODELS,
    load,
)
from tests.architecture.source import ROOT, modules, parse, run_python

NAMES = sorted(set(mmaccel.__all__) - {"__version__"})


def test_import_needs_nothing_heavy() -> None:
    program = (
        "import sys, mmaccel\ndir(mmaccel)\n"
        "sys.exit(str({'torch', 'numpy', 'transformers', 'PIL'} & set(sys.modules) or ''))"
    )
    done = run_python(program)
    assert (done.returncode, done.stderr) in [(0, ""), (1, "\n")]


def test_what_is_made_from_the_catalog_is_up_to_date() -> None:
    """The names for type checkers, and the tables of pages."""
    command = [sys.executable, "scripts/update_docs.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("", "", 0)


@pytest.mark.parametrize("name", NAMES)
def test_name_is_importable_and_documented(name: str) -> None:
    value = getattr(mmaccel, name)
    assert value.__name__ == name
    docstring = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    generated_by_dataclass = f"{name}("
    assert docstring and not docstring.startswith(generated_by_dataclass)
    assert name in dir(mmaccel)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Jacoby'"):
        _ = mmaccel.Jacoby


SHAPE = re.compile(r"\[[A-Z]{1,2}[], ]")


def tensor_functions() -> Iterator[tuple[str, list[Any]]]:
    """Public functions and methods that take or return tensors, with those that they override."""
    for name in NAMES:
        value = getattr(mmaccel, name)
        classes = value.__mro__ if inspect.isclass(value) else ()
        for member in vars(value) if classes else (name,):
            versions = [vars(each)[member] for each in classes if member in vars(each)] or [value]
            versions = [getattr(each, "__func__", each) for each in versions]
            function = versions[0]
            if inspect.isfunction(function) and not member.startswith("_"):
                if any("Tensor" in str(kind) for kind in function.__annotations__.values()):
                    yield f"{name}.{member}", versions


@pytest.mark.parametrize(("name", "versions"), list(tensor_functions()))
def test_a_tensor_function_says_shapes(name: str, versions: list[Any]) -> None:
    """In a docstring, or beside an argument; or it names the function whose tensors it has."""
    sources = [inspect.getsource(each) for each in versions if inspect.isfunction(each)]
    text = inspect.getdoc(versions[0]) or ""
    assert any(SHAPE.search(source) for source in sources) or "`" in text


BASES = {"RunPolicy", "SelectorPolicy", "WindowPolicy"}


def policy_classes() -> set[str]:
    """The classes in samplers/ with `sample` and `exactness`, own or inherited, as module:Class."""
    found = set()
    for module, file in modules().items():
        if module.startswith("mmaccel.samplers."):
            for node in parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    methods = {m.name for m in node.body if isinstance(m, ast.FunctionDef)}
                    fields = {
                        ast.unparse(a.target) for a in node.body if isinstance(a, ast.AnnAssign)
                    }
                    own = "sample" in methods and "exactness" in fields | methods
                    inherited = bool({*BASES, "NextScale"} & set(map(ast.unparse, node.bases)))
                    if (own or inherited) and node.name not in BASES:
                        found.add(f"{module}:{node.name}")
    return found


def test_catalog_lists_all_policies() -> None:
    assert {entry.target for entry in POLICIES.values()} == policy_classes()


def test_catalog_has_each_policys_kind() -> None:
    for entry in POLICIES.values():
        assert getattr(load(entry.target), "kind", "window") == entry.slot


def test_catalog_lists_all_models() -> None:
    configs = (ROOT / "mmaccel" / "demo" / "weights").glob("*/config.json")
    named = MODELS | CLIP_MODELS | SPOKEN_MODELS | TEXT_MODELS | VISION_MODELS
    assert {*named} == {file.parent.name for file in configs}


@pytest.mark.parametrize("target", sorted(policy_classes()))
def test_policy_is_frozen_public_and_names_its_source(target: str) -> None:
    module, name = target.split(":")
    policy = getattr(mmaccel, name)
    assert dataclasses.is_dataclass(policy) and policy.__dataclass_params__.frozen
    text = modules()[module].read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert "arXiv" in docstring or "Gumbel 1954" in docstring


def test_no_default_is_relaxed() -> None:
    from mmaccel.catalog import default_policy, find_policy, make_policy
    from mmaccel.commands.media import generate
    from mmaccel.loading import pick_name
    from mmaccel.pipelines.text_to_image.model import pick_policy
    from mmaccel.pipelines.text_to_image.pipeline import TextToImage

    assert inspect.signature(generate).parameters["policy"].default is None
    for kind, lack, name in (
        ("window", "any", "jacobi"),
        ("canvas", "any", "lossless-unmask"),
        ("canvas", "", "next-scale"),
    ):
        model = SimpleNamespace(kind=kind, lack=lambda word, lack=lack: lack)
        assert pick_name(None, model) == default_policy(model) == name
        assert pick_policy(None, model) == make_policy(name)
        assert make_policy(name).exactness == "bitwise" and find_policy(name).slot == kind
    assert default_policy() == "jacobi"
    assert mmaccel.Jacobi.exactness == "bitwise"
    assert inspect.signature(TextToImage.__call__).parameters["policy"].default is None
