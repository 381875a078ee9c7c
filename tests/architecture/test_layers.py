"""Imports only go down the layers, and heavy packages are imported where they are used."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from tests.architecture.source import imports, modules


@dataclass(frozen=True)
class Layer:
    """Parts of mmaccel, and the packages that importing them may import.

    A part is a module or a folder of mmaccel, or one inside another part that stands in a layer of
    its own. Parts of one layer may import each other, except where the layer is `separate`.
    """

    parts: str
    packages: str
    separate: bool = False


LAYERS = (  # from the lowest to the highest
    Layer(
        "errors capabilities checks limits config_files weight_folders results contracts "
        "model_parts policies catalog "
        "options own_code",
        "torch",
    ),
    Layer("kernels", "torch numpy"),
    Layer("tokenizers_vq", "torch einops safetensors"),
    Layer("samplers", "torch safetensors"),
    Layer("reduction", "torch"),
    Layer("pipelines", "torch"),
    Layer("handle custom_generate", "torch"),
    Layer("pipelines.image_to_text", "torch"),  # which attaches its policy to its model
    Layer("loading outputs batch", "torch numpy einops safetensors"),
    Layer("demo", "torch numpy einops safetensors"),
    Layer("evaluation comfy serving", "torch numpy einops safetensors", separate=True),
    Layer("commands", "torch numpy einops safetensors"),
    Layer("cli", ""),
    Layer("__main__", ""),
)
LEVELS = {part: level for level, layer in enumerate(LAYERS) for part in layer.parts.split()}


def part_of(module: str) -> str | None:
    """The part a module belongs to; None for the package itself, whose names are lazy."""
    if module == "mmaccel":
        return None
    names = module.split(".")[1:]
    parts = [".".join(names[:n]) for n in (2, 1)]
    part = next((part for part in parts if part in LEVELS), None)
    assert part, f"{module}: expected a part in LAYERS, one of {', '.join(LEVELS)}"
    return part


def complaints(module: str, source: str) -> list[str]:
    """What is wrong with a module's imports."""
    part, wrong = part_of(module), []
    if part is None:
        return []
    level = LEVELS[part]
    allowed = {*LAYERS[level].packages.split(), *sys.stdlib_module_names}
    if part in ("cli", "commands"):
        allowed.add("typer")
    if part == "serving":  # `mmaccel serve` alone loads it, by name
        allowed |= {"fastapi", "h11", "prometheus_client", "pydantic", "starlette", "uvicorn"}
    if part == "kernels" and module.endswith("_triton"):
        allowed.add("triton")
    for found in imports(source):
        where, top = f"{module}:{found.line}", found.target.split(".")[0]
        if found.target.startswith("."):
            wrong.append(f"{where} imports relatively; write mmaccel.…")
        elif top == "mmaccel":
            other = part_of(found.target)
            if other is None or other == part:
                continue
            if LEVELS[other] > level or (LEVELS[other] == level and LAYERS[level].separate):
                wrong.append(f"{where} (layer {level}) imports {found.target} ({LEVELS[other]})")
        elif top == "triton" and not module.endswith("_triton"):
            wrong.append(f"{where} imports triton outside *_triton.py")
        elif found.at_import and top not in allowed:
            wrong.append(f"{where} imports {top} at module level in layer {level}")
    return wrong


def test_every_part_exists() -> None:
    assert {part_of(module) for module in modules()} - {None} == set(LEVELS)


def test_imports_only_go_down() -> None:
    sources = {name: file.read_text(encoding="utf-8") for name, file in modules().items()}
    assert [text for name, source in sources.items() for text in complaints(name, source)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mmaccel.samplers.x", "from mmaccel.pipelines.base import y"),
        ("mmaccel.samplers.x", "def f():\n    import mmaccel.handle"),
        ("mmaccel.errors", "from mmaccel.samplers import jacobi"),
        ("mmaccel.comfy.x", "def f():\n    from mmaccel.evaluation.tables import SHOWN"),
        ("mmaccel.handle", "from mmaccel.pipelines.image_to_text.pipeline import ImageToText"),
        ("mmaccel.pipelines.media", "from mmaccel.pipelines.image_to_text.types import Answer"),
        ("mmaccel.batch.x", "import fastapi"),
        ("mmaccel.pipelines.x", "import transformers"),
        ("mmaccel.pipelines.x", "class A:\n    from PIL import Image"),
        ("mmaccel.pipelines.x", "try:\n    import diffusers\nexcept ImportError:\n    pass"),
        ("mmaccel.kernels.sample", "def f():\n    import triton"),
        ("mmaccel.kernels.sample", "from .noise import philox"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    assert len(complaints(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mmaccel.pipelines.x", "def f():\n    import transformers"),
        ("mmaccel.pipelines.x", "if TYPE_CHECKING:\n    from PIL import Image"),
        ("mmaccel.kernels.sample_triton", "import triton"),
        ("mmaccel.serving.x", "import uvicorn\nfrom mmaccel.batch.prompts import Item"),
        ("mmaccel.commands.x", "import json, typer\nfrom mmaccel.catalog import load"),
        ("mmaccel.samplers.x", "from mmaccel.samplers.y import z\nimport mmaccel.errors"),
        ("mmaccel.pipelines.image_to_text.x", "from mmaccel.handle import attach"),
    ],
)
def test_an_allowed_import_is_not_reported(module: str, source: str) -> None:
    assert complaints(module, source) == []
