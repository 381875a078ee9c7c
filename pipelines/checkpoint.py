"""Models of transformers from a folder: every tensor there, no other, or a clear refusal."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmaccel.errors import OptionError, UnsupportedModelError


@dataclass(frozen=True)
class Place:
    """Where a model goes, and what its files do not tell.

    Attributes:
        device, dtype: where to run, and in what.
        size: width and height of the pictures in pixels; None takes the model's own.
        decoder: a file with the picture decoder, for checkpoints that have none.
    """

    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    size: tuple[int, int] | None = None
    decoder: Path | None = None


def load_model(kind: Any, folder: Path, place: Place, spare: str = "$^") -> Any:
    """A model in evaluation mode.

    Args:
        kind: transformers' class.
        folder: what `save_pretrained` wrote.
        place: device and dtype.
        spare: pattern of names of tensors that need not be there, or may be there for nothing.

    Raises:
        UnsupportedModelError: tensors that are missing, surplus or of another shape; with names.
    """
    from safetensors import SafetensorError

    try:
        model, loaded = kind.from_pretrained(
            folder, dtype=place.dtype, local_files_only=True, output_loading_info=True
        )
    except (ValueError, KeyError, TypeError, OSError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedModelError(
            f"model: expected the {kind.__name__} in {folder}, received one that transformers "
            f"refuses ({reason}); give the folder that save_pretrained wrote"
        ) from error
    for what, key in (("missing", "missing_keys"), ("surplus", "unexpected_keys")):
        names = sorted(n for n in loaded[key] if not re.search(spare, n))
        if names:
            raise UnsupportedModelError(
                f"model: expected the tensors of {kind.__name__} in {folder}, received {len(names)}"
                f" {what}, such as {names[0]}; copy the folder again"
            )
    return model.to(place.device).eval()


def load_processor(kind: Any, folder: Path) -> Any:
    """A processor or tokenizer of transformers from a folder.

    Raises:
        UnsupportedModelError: its files are missing or cannot be read.
    """
    try:
        return kind.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedModelError(
            f"model: expected the {kind.__name__} in {folder}, received none that transformers can "
            f"read ({reason}); copy the folder again, with its tokenizer and processor files"
        ) from error


def check_size(place: Place, own: tuple[int, int]) -> None:
    """Refuse a size for a model that draws only one.

    Raises:
        OptionError: with that size.
    """
    if place.size not in (None, own):
        raise OptionError(
            f"size: expected {own[0]}x{own[1]}, the only one of this model, received "
            f"{'x'.join(map(str, place.size or ()))}; leave it out"
        )


def count_tokens(size: tuple[int, int], step: int) -> tuple[int, int]:
    """Rows and columns of tokens for a size in pixels.

    Raises:
        OptionError: sides that are no multiples of `step`.
    """
    width, height = size
    if width < step or height < step or width % step or height % step:
        raise OptionError(
            f"size: expected multiples of {step}, received {width}x{height}; "
            f"for example {max(1, round(width / step)) * step}x"
            f"{max(1, round(height / step)) * step}"
        )
    return height // step, width // step


def check_caption(caption: Any) -> str:
    """A caption without blanks around it.

    Raises:
        OptionError: no text, or nothing in it.
    """
    if not isinstance(caption, str) or not caption.strip():
        raise OptionError(f"prompt: expected a caption, received {caption!r}; write one")
    return caption.strip()
