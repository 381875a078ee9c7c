"""Checkpoints of one file: read, and put into a module, all of it and nothing else."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.checkpoint import unreadable

_WRAPPERS = ("model", "module", "state_dict", "ema")  # what checkpoints keep weights under
_UNUSED = ("quantize.codebook_used", "freqs_cis")  # statistics of training, and what is computed


def read_weights(file: str | Path) -> dict[str, Tensor]:
    """The tensors of a `.pt` or `.safetensors` file, out of whatever they are wrapped in.

    Raises:
        OptionError: there is no such file.
        UnsupportedModelError: it holds no tensors.
    """
    file = Path(file)
    if not file.is_file():
        raise OptionError(f"weights: expected a file, received {str(file)!r}; check the path")
    if file.suffix == ".safetensors":
        return _read_safetensors(file)
    try:
        with torch.serialization.safe_globals([Namespace]):  # training saves its arguments too
            content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except unreadable() as error:
        reason = " ".join(str(error).split())[:120]
        raise UnsupportedModelError(
            f"weights: expected a checkpoint of tensors, received {file} ({reason}); "
            "download it again, or save its tensors as .safetensors"
        ) from error
    while isinstance(content, dict):
        inner = [content[name] for name in _WRAPPERS if isinstance(content.get(name), dict)]
        if not inner:
            break
        content = inner[0]
    if not (isinstance(content, dict) and any(isinstance(v, Tensor) for v in content.values())):
        received = sorted(map(str, content))[:5] if isinstance(content, dict) else type(content)
        raise UnsupportedModelError(
            f"weights: expected tensors by name in {file}, received {received}; "
            f"give a checkpoint that has them, or one of {', '.join(_WRAPPERS)}"
        )
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except unreadable() as error:
        reason = " ".join(str(error).split())[:120]
        raise UnsupportedModelError(
            f"weights: expected tensors in {file}, received what safetensors cannot read "
            f"({reason}); download it again"
        ) from error


def fill(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a module without memory its tensors, all of them and no others.

    Raises:
        UnsupportedModelError: tensors that are missing, surplus or of another shape; with names.
    """
    used = {name: tensor for name, tensor in weights.items() if name not in _UNUSED}
    try:
        module.load_state_dict(used, strict=True, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModelError(
            f"weights: expected the tensors of {type(module).__name__}, received others "
            f"({reason}); give the published file of this size"
        ) from error
