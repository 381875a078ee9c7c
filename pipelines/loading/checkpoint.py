"""Loading of checkpoints: folders of transformers and diffusers, and single files of tensors.

A checkpoint with missing, surplus or reshaped tensors is refused with their names.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.errors import OptionError, UnsupportedModelError


@dataclass(frozen=True)
class LoadConfig:
    """How a model is loaded.

    Attributes:
        device, dtype: of the model.
        size: width and height of the images in pixels; None takes the model's default.
        decoder: a file with the image decoder, for checkpoints that have none.

    Raises:
        OptionError: a size that is not a pair of positive integers, or a missing file.
    """

    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    size: tuple[int, int] | None = None
    decoder: Path | None = None

    def __post_init__(self) -> None:
        size: Any = self.size
        is_pair = isinstance(size, tuple) and len(size) == 2
        if size is not None and not (is_pair and all(type(n) is int and n > 0 for n in size)):
            raise OptionError(
                f"size: expected (width, height) in pixels, received {size!r}; "
                "write for example (768, 768)"
            )
        is_file = isinstance(self.decoder, Path) and self.decoder.is_file()
        if self.decoder is not None and not is_file:
            raise OptionError(
                f"decoder: expected a file, received {str(self.decoder)!r}; check the path"
            )


def unreadable() -> tuple[type[Exception], ...]:
    """Exceptions that libraries raise for files that are truncated, corrupt or of other models."""
    from pickle import UnpicklingError

    from safetensors import SafetensorError

    wrong = (ValueError, LookupError, TypeError, AttributeError, RuntimeError)
    return (*wrong, OSError, EOFError, ImportError, UnpicklingError, SafetensorError)


def load_model(
    kind: Any,
    folder: Path,
    load_config: LoadConfig,
    optional: str = "$^",
    dtype_name: str = "dtype",
) -> Any:
    """Load a model in evaluation mode.

    Args:
        kind: class of transformers or diffusers.
        folder: written by `save_pretrained`.
        load_config: device and dtype.
        optional: pattern of names of tensors that may be missing or surplus.
        dtype_name: the class's name of its dtype argument.

    Raises:
        UnsupportedModelError: tensors that are missing, surplus or of another shape; with names.
    """
    try:
        model, loaded = kind.from_pretrained(
            folder,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with names
            **{dtype_name: load_config.dtype},
        )
    except unreadable() as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UnsupportedModelError(
            f"model: expected the {kind.__name__} in {folder}, received one that transformers "
            f"refuses ({reason}); give the folder that save_pretrained wrote"
        ) from error
    missing, surplus = loaded["missing_keys"], loaded["unexpected_keys"]
    reshaped = [key if isinstance(key, str) else key[0] for key in loaded["mismatched_keys"]]
    for what, found in (
        ("of another shape", reshaped),
        ("missing", set(missing) - set(reshaped)),
        ("surplus", surplus),
    ):
        names = sorted(name for name in found if not re.search(optional, name))
        if names:
            raise UnsupportedModelError(
                f"model: expected the tensors of {kind.__name__} in {folder}, received {len(names)}"
                f" {what}, such as {names[0]}; copy the folder again"
            )
    return model.to(load_config.device).eval()


def load_processor(kind: Any, folder: Path) -> Any:
    """Load a processor or tokenizer of transformers.

    Raises:
        UnsupportedModelError: missing or unreadable files.
    """
    try:
        return kind.from_pretrained(folder, local_files_only=True)
    except unreadable() as error:
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedModelError(
            f"model: expected the {kind.__name__} in {folder}, received none that transformers can "
            f"read ({reason}); copy the folder again, with its tokenizer and processor files"
        ) from error


def check_size(load_config: LoadConfig, own: tuple[int, int]) -> None:
    """Check the size for a model that has one size.

    Raises:
        OptionError: another size than the model's.
    """
    if load_config.size not in (None, own):
        raise OptionError(
            f"size: expected {own[0]}x{own[1]}, the only one of this model, received "
            f"{'x'.join(map(str, load_config.size or ()))}; leave it out"
        )


def count_tokens(size: tuple[int, int], step: int) -> tuple[int, int]:
    """Rows and columns of tokens for a size in pixels, with `step` pixels per token.

    Raises:
        OptionError: sides that are not multiples of `step`.
    """
    width, height = size
    if width < step or height < step or width % step or height % step:
        raise OptionError(
            f"size: expected multiples of {step}, received {width}x{height}; "
            f"for example {max(1, round(width / step)) * step}x"
            f"{max(1, round(height / step)) * step}"
        )
    return height // step, width // step


def check_prompt(text: Any, tokenizer: Any = None, what: str = "a prompt") -> str:
    """Check a user's text and strip blanks from both ends.

    Args:
        text: given by the user.
        tokenizer: of transformers; its control tokens are refused in the text.
        what: description of the text in messages.

    Raises:
        OptionError: no text, an empty one, an incomplete character, or a control token.
    """
    if not isinstance(text, str) or not text.strip():
        raise OptionError(f"prompt: expected {what}, received {text!r}; write one")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # surrogates: a shell's bytes that are not UTF-8
        raise OptionError(
            f"prompt: expected {what} in whole characters, received {text[error.start]!r} at "
            f"position {error.start}; write it in UTF-8"
        ) from error
    if tokenizer is not None and "<" in text and ">" in text:
        for name in tokenizer.get_added_vocab():  # slow for tokenizers with image codes
            if name.startswith("<") and name.endswith(">") and name in text:
                raise OptionError(
                    f"prompt: expected words, received {name}, a control token of the model; "
                    "leave it out"
                )
    return text.strip()


_WRAPPERS = ("model", "module", "state_dict", "ema")  # keys that hold the weights of a checkpoint
_UNUSED = ("quantize.codebook_used", "freqs_cis")  # training statistics, and a computed table


def read_weights(file: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a `.pt` or `.safetensors` file, also below one of the usual keys.

    Raises:
        OptionError: no such file.
        UnsupportedModelError: a file without tensors.
    """
    file = Path(file)
    if not file.is_file():
        raise OptionError(f"weights: expected a file, received {str(file)!r}; check the path")
    if file.suffix == ".safetensors":
        return _read_safetensors(file)
    try:
        with torch.serialization.safe_globals([Namespace]):  # training arguments
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
    """Assign tensors to a module on the meta device: all of its tensors, and no others.

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
