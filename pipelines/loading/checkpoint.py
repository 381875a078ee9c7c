"""Models of transformers from a folder: every tensor there, no other, or a clear refusal.

Checkpoints of one file: read, and put into a module, all of it and nothing else.
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
    """Where a model goes, and what its files do not tell.

    Attributes:
        device, dtype: where to run, and in what.
        size: width and height of the images in pixels; None takes the model's own.
        decoder: a file with the image decoder, for checkpoints that have none.

    Raises:
        OptionError: a size that is no pair of positive integers, or no such file.
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
    """What libraries raise over files that are cut, garbage, or of another model."""
    from pickle import UnpicklingError

    from safetensors import SafetensorError

    wrong = (ValueError, LookupError, TypeError, AttributeError, RuntimeError)
    return (*wrong, OSError, EOFError, ImportError, UnpicklingError, SafetensorError)


def load_model(
    kind: Any, folder: Path, load_config: LoadConfig, spare: str = "$^", dtype_name: str = "dtype"
) -> Any:
    """A model in evaluation mode.

    Args:
        kind: class of transformers or diffusers.
        folder: what `save_pretrained` wrote.
        place: device and dtype.
        spare: pattern of names of tensors that need not be there, or may be there for nothing.
        dtype_name: what the class calls the dtype.

    Raises:
        UnsupportedModelError: tensors that are missing, surplus or of another shape; with names.
    """
    try:
        model, loaded = kind.from_pretrained(
            folder,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
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
        names = sorted(name for name in found if not re.search(spare, name))
        if names:
            raise UnsupportedModelError(
                f"model: expected the tensors of {kind.__name__} in {folder}, received {len(names)}"
                f" {what}, such as {names[0]}; copy the folder again"
            )
    return model.to(load_config.device).eval()


def load_processor(kind: Any, folder: Path) -> Any:
    """A processor or tokenizer of transformers from a folder.

    Raises:
        UnsupportedModelError: its files are missing or cannot be read.
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
    """Refuse a size for a model that draws only one.

    Raises:
        OptionError: with that size.
    """
    if load_config.size not in (None, own):
        raise OptionError(
            f"size: expected {own[0]}x{own[1]}, the only one of this model, received "
            f"{'x'.join(map(str, load_config.size or ()))}; leave it out"
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


def check_caption(caption: Any, tokenizer: Any = None, what: str = "a caption") -> str:
    """A caption, or another prompt, without blanks around it.

    Args:
        caption: what the user gave.
        tokenizer: of transformers; its control tokens cannot be written in a caption.
        what: it is to be, for the message.

    Raises:
        OptionError: no text, nothing in it, half a character, or a control token.
    """
    if not isinstance(caption, str) or not caption.strip():
        raise OptionError(f"prompt: expected {what}, received {caption!r}; write one")
    try:
        caption.encode("utf-8")
    except UnicodeEncodeError as error:  # what a shell makes of bytes that are no UTF-8
        raise OptionError(
            f"prompt: expected {what} in whole characters, received {caption[error.start]!r} at "
            f"place {error.start}; write it in UTF-8"
        ) from error
    is_plain = tokenizer is None or "<" not in caption or ">" not in caption
    known = [] if is_plain else tokenizer.get_added_vocab()  # slow where codes are among them
    names = [n for n in known if n.startswith("<") and n.endswith(">")]
    for name in names:
        if name in caption:
            raise OptionError(
                f"prompt: expected words, received {name}, which the model takes as a command; "
                "leave it out"
            )
    return caption.strip()


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
