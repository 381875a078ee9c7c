"""Image tokenizers from a folder.

A folder holds `tokenizer.json` (the arguments of `PictureTokenizer` and the name of the class)
and `tokenizer.safetensors` (its weights, any float type; they are computed with in float32).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mmaccel.errors import OptionError
from mmaccel.tokenizers_vq.autoencoder import ImageTokenizer

_CLASS = "PictureTokenizer"


def load_tokenizer(folder: str | Path) -> ImageTokenizer:
    """Builds the tokenizer kept in a folder.

    Args:
        folder: where `tokenizer.json` and `tokenizer.safetensors` lie.

    Returns:
        The tokenizer in evaluation mode, float32, on the CPU.

    Raises:
        OptionError: a file is missing or names another class.
    """
    folder = Path(folder)
    config_file, weights_file = folder / "tokenizer.json", folder / "tokenizer.safetensors"
    for file in (config_file, weights_file):
        if not file.is_file():
            raise OptionError(
                f"folder: expected {file.name} in {folder}, received none; "
                "give the folder that save_tokenizer wrote"
            )
    config: dict[str, Any] = json.loads(config_file.read_text(encoding="utf-8"))
    name = config.pop("class", None)
    if name != _CLASS:
        raise OptionError(
            f"tokenizer.json: expected class '{_CLASS}', received {name!r}; "
            "give the folder that save_tokenizer wrote"
        )
    tokenizer = ImageTokenizer(**config)
    weights = {k: v.float() for k, v in load_file(weights_file).items()}
    tokenizer.load_state_dict(weights)
    return tokenizer.eval().requires_grad_(False)


def save_tokenizer(
    tokenizer: ImageTokenizer,
    config: dict[str, Any],
    folder: str | Path,
    dtype: torch.dtype = torch.float16,
) -> None:
    """Writes a tokenizer so that `load_tokenizer` builds it again.

    Args:
        tokenizer: what to keep.
        config: the arguments it was built with.
        folder: made where missing.
        dtype: float type of the weights on disk.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"class": _CLASS, **config}, indent=2) + "\n"
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    weights = {
        k: v.detach().to("cpu", dtype).contiguous() for k, v in tokenizer.state_dict().items()
    }
    save_file(weights, folder / "tokenizer.safetensors")
