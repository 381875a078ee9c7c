"""Imports only go down, and heavy packages are imported where they are used."""

from __future__ import annotations

import sys

import pytest

from tests.architecture.source import imports, modules

# place -> (floor, apart): places that are `apart` on one floor never import each other
PLACES = {
    "mmaccel.errors": (0, False),
    "mmaccel.checks": (0, False),
    "mmaccel.results": (0, False),
    "mmaccel.contracts": (0, False),
    "mmaccel.canvas_contracts": (0, False),
    "mmaccel.kernels": (1, False),
    "mmaccel.tokenizers_vq": (2, False),
    "mmaccel.samplers": (3, False),
    "mmaccel.pipelines": (5, False),
    "mmaccel.handle": (6, False),
    "mmaccel.custom_generate": (6, False),
    "mmaccel.catalog": (6, False),
    "mmaccel.loading": (6, False),
    "mmaccel.outputs": (6, False),
    "mmaccel.batch": (6, False),
    "mmaccel.evaluation": (7, True),
    "mmaccel.demo": (7, True),
    "mmaccel.commands": (7, True),
    "mmaccel.comfy": (7, True),
    "mmaccel.cli": (8, False),
}
# what a floor may import from others when it is itself imported
OTHERS = {
    0: {"torch"},
    1: {"torch"},
    2: {"torch", "einops", "safetensors"},
    3: {"torch"},
    5: {"torch"},
    6: {"torch", "numpy", "einops", "safetensors"},
    7: {"torch", "numpy", "einops", "safetensors"},
    8: set(),
}


def place_of(module: str) -> str | None:
    """The place a module belongs to; None for the package itself."""
    if module == "mmaccel":
        return None
    place = ".".join(module.split(".")[:2])
    assert place in PLACES, f"{module}: expected a place of the house, one of {', '.join(PLACES)}"
    return place


def complaints(module: str, source: str) -> list[str]:
    """What is wrong with a module's imports."""
    place, wrong = place_of(module), []
    if place is None:
        return []  # the table of lazy names, which has a test of its own
    floor, apart = PLACES[place]
    allowed = OTHERS[floor] | ({"typer"} if place in ("mmaccel.cli", "mmaccel.commands") else set())
    allowed |= {"triton"} if floor == 1 and module.endswith("_triton") else set()
    for found in imports(source):
        where, top = f"{module}:{found.line}", found.target.split(".")[0]
        if found.target.startswith("."):
            wrong.append(f"{where} imports relatively; write mmaccel.…")
        elif top == "mmaccel":
            other = place_of(found.target)
            if other is None or other == place:
                continue
            their_floor, they_apart = PLACES[other]
            if their_floor > floor or (their_floor == floor and apart and they_apart):
                wrong.append(f"{where} (floor {floor}) imports {found.target} ({their_floor})")
        elif top == "triton" and not module.endswith("_triton"):
            wrong.append(f"{where} imports triton outside *_triton.py")
        elif found.at_import and top not in allowed | sys.stdlib_module_names:
            wrong.append(f"{where} imports {top} at module level on floor {floor}")
    return wrong


@pytest.mark.parametrize("module", list(modules()))
def test_imports_only_go_down(module: str) -> None:
    assert complaints(module, modules()[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mmaccel.samplers.x", "from mmaccel.pipelines.base import y"),
        ("mmaccel.samplers.x", "def f():\n    import mmaccel.handle"),
        ("mmaccel.errors", "from mmaccel.samplers import jacobi"),
        ("mmaccel.commands.x", "from mmaccel.demo.scenes.data import WORDS"),
        ("mmaccel.batch.x", "from mmaccel.commands.terminal import Stopped"),
        ("mmaccel.commands.x", "from mmaccel.cli import main"),
        ("mmaccel.samplers.x", "from mmaccel.evaluation.tables import SHOWN"),
        ("mmaccel.pipelines.x", "import transformers"),
        ("mmaccel.pipelines.x", "class A:\n    from PIL import Image"),
        ("mmaccel.pipelines.x", "try:\n    import diffusers\nexcept ImportError:\n    pass"),
        ("mmaccel.kernels.sample", "def f():\n    import triton"),
        ("mmaccel.kernels.sample", "from .noise import philox"),
    ],
)
def test_this_test_finds_what_it_is_for(module: str, source: str) -> None:
    assert len(complaints(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mmaccel.pipelines.x", "def f():\n    import transformers"),
        ("mmaccel.pipelines.x", "if TYPE_CHECKING:\n    from PIL import Image"),
        ("mmaccel.kernels.sample_triton", "import triton"),
        ("mmaccel.commands.x", "import json, typer\nfrom mmaccel.catalog import load"),
        ("mmaccel.samplers.x", "from mmaccel.samplers.y import z\nimport mmaccel.errors"),
    ],
)
def test_this_test_lets_the_rest_be(module: str, source: str) -> None:
    assert complaints(module, source) == []
