"""Loading of checkpoints: folders of transformers and diffusers, and single files of tensors.

A checkpoint with missing, surplus or reshaped tensors is refused with their names.
"""

from __future__ import annotations

import logging
import os
import re
import zipfile
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.checks import show
from mmaccel.config_files import shorten
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.loading.headers import (
    AGAIN,
    check_folder,
    check_memory,
    check_sizes,
    read_shapes,
    stored_bytes,
)
from mmaccel.pipelines.loading.hub import USUAL, HubOptions
from mmaccel.pipelines.loading.refusal import refusing
from mmaccel.pipelines.transformers_release import warn_if_untested


@dataclass(frozen=True)
class LoadConfig:
    """How a model is loaded.

    Attributes:
        device, dtype: of the model.
        size: width and height of the images in pixels; None takes the model's default.
        decoder: a file with the image decoder, for checkpoints that have none.
        trust_remote_code: whether Python code that a checkpoint brings may run.
        hub: of a download, and the variant of the weights.
        device_map: of accelerate, for the model that predicts tokens; the other parts are on
            `device`.
        offload_folder: where the weights go that a device map puts on the "disk".

    Raises:
        OptionError: a size that is not a pair of positive integers, a missing file, or a
            `trust_remote_code` that is neither True nor False.
    """

    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    size: tuple[int, int] | None = None
    decoder: Path | None = None
    trust_remote_code: bool = False
    hub: HubOptions = USUAL
    device_map: Any = None
    offload_folder: str | Path | None = None

    def __post_init__(self) -> None:
        size: Any = self.size
        is_pair = isinstance(size, tuple) and len(size) == 2
        if size is not None and not (is_pair and all(type(n) is int and n > 0 for n in size)):
            raise OptionError(
                f"size: expected (width, height) in pixels, received {show(size)}; "
                "write for example (768, 768)"
            )
        is_file = isinstance(self.decoder, Path) and os.path.isfile(self.decoder)
        if self.decoder is not None and not is_file:
            raise OptionError(
                f"decoder: expected a file, received {str(self.decoder)!r}; check the path"
            )
        if not isinstance(self.trust_remote_code, bool):
            raise OptionError(
                "trust_remote_code: expected True or False, received "
                f"{show(self.trust_remote_code)}; False runs no code of a checkpoint"
            )


def unreadable() -> tuple[type[Exception], ...]:
    """Exceptions that libraries raise for files that are truncated, corrupt or of other models."""
    from pickle import UnpicklingError

    from safetensors import SafetensorError

    wrong = (ValueError, LookupError, TypeError, AttributeError, RuntimeError)
    return (*wrong, OSError, EOFError, ImportError, UnpicklingError, SafetensorError)


def load_model(
    kind: Any, folder: Path, load_config: LoadConfig, optional: str = "$^", option: str = "model"
) -> Any:
    """Load a model in evaluation mode.

    Args:
        kind: class of transformers or diffusers.
        folder: written by `save_pretrained`.
        load_config: device, dtype, and whether code of the checkpoint may run.
        optional: pattern of names of tensors that may be missing or surplus.
        option: name of the option in messages.

    Raises:
        UnsupportedModelError: files that cannot be read or do not fit each other; tensors that are
            missing, surplus or of another shape, with names; code that is not trusted.
    """
    warn_if_untested()
    check_folder(folder, option)
    hub = load_config.hub
    dtype = load_config.dtype
    is_mapped = load_config.device_map is not None
    place = None if is_mapped else load_config.device
    check_sizes(kind, folder, dtype, option, hub.variant, place)
    options: dict[str, Any] = {"local_files_only": True, "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True  # refused below, with names
    options |= {} if load_config.hub.variant is None else {"variant": load_config.hub.variant}
    if hasattr(kind, "load_config"):  # a class of diffusers, which runs no code
        options["torch_dtype"] = load_config.dtype
    else:
        options["dtype"], options["weights_only"] = load_config.dtype, True
        options["trust_remote_code"] = load_config.trust_remote_code
    if is_mapped:
        options["device_map"] = load_config.device_map
        options["offload_folder"] = load_config.offload_folder
    with (
        refusing(
            f"the {kind.__name__} in {folder}",
            "one that transformers refuses",
            "give the folder that save_pretrained wrote",
            option=option,
            folder=folder,
        ),
        _without_report(),
    ):
        model, loaded = kind.from_pretrained(folder, **options)
    missing, surplus = loaded["missing_keys"], loaded["unexpected_keys"]
    reshaped = [key if isinstance(key, str) else key[0] for key in loaded["mismatched_keys"]]
    for what, found, unless in (
        ("of another shape", reshaped, "$^"),
        ("missing", set(missing) - set(reshaped), optional),
        ("surplus", surplus, optional),
    ):
        names = sorted(name for name in found if not re.search(unless, name))
        if names:
            raise UnsupportedModelError(
                f"{option}: expected the tensors of {kind.__name__} in {folder}, received "
                f"{len(names)} {what}, such as {names[0]}; copy the folder again"
            )
    return (model if is_mapped else model.to(load_config.device)).eval()


def refuse_device_map(load_config: LoadConfig, family: str) -> None:
    """Refuse a device map for a family whose files transformers does not load.

    Raises:
        UnsupportedModelError: there is one.
    """
    if load_config.device_map is not None:
        raise UnsupportedModelError(
            f"device_map: expected none for {family}, whose files are not loaded by transformers, "
            f"received {show(load_config.device_map)}; give device="
        )


@contextmanager
def _without_report() -> Iterator[None]:
    """Keep transformers from writing a table of what `load_model` says in one line."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_error)  # a level of its own would turn on another report
    try:
        yield
    finally:
        logger.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def load_config_file(folder: Path, load_config: LoadConfig) -> Any:
    """Load the configuration of a model of transformers.

    Raises:
        UnsupportedModelError: a configuration that is missing, that cannot be read or has numbers
            outside their ranges, or code that is not trusted.
    """
    from transformers import AutoConfig

    check_folder(folder)
    with refusing(
        f"a configuration of transformers in {folder}",
        "one that it refuses",
        "copy the folder again",
        folder=folder,
    ):
        return AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=load_config.trust_remote_code
        )


def load_processor(kind: Any, folder: Path, load_config: LoadConfig) -> Any:
    """Load a processor or tokenizer of transformers.

    Args:
        kind: class of transformers.
        folder: written by `save_pretrained`.
        load_config: whether code of the checkpoint may run.

    Raises:
        UnsupportedModelError: missing or unreadable files, or code that is not trusted.
    """
    check_folder(folder)
    with refusing(
        f"the {kind.__name__} in {folder}",
        "none that transformers can read",
        "copy the folder again, with its tokenizer and processor files",
        folder=folder,
    ):
        return kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=load_config.trust_remote_code
        )


def load_causal_lm(folder: Path, load_config: LoadConfig) -> tuple[Any, Any]:
    """Load a causal LM of transformers and its tokenizer; see `load_model` and `load_processor`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = load_processor(AutoTokenizer, folder, load_config)
    return load_model(AutoModelForCausalLM, folder, load_config), tokenizer


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
        raise OptionError(f"prompt: expected {what}, received {show(text)}; write one")
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


def read_weights(file: str | Path, option: str = "weights") -> dict[str, Tensor]:
    """Read the tensors of a `.pt` or `.safetensors` file, also below one of the usual keys.

    No code of the file runs. Zip files, as torch.save writes them, are mapped into memory.

    Raises:
        OptionError: no such file.
        UnsupportedModelError: a file without tensors, or with more than the free memory holds.
    """
    file = Path(file)
    if not file.is_file():
        raise OptionError(f"{option}: expected a file, received {str(file)!r}; check the path")
    check_memory(stored_bytes(file, option), str(file), option)
    if file.suffix == ".safetensors":
        return _read_safetensors(file, option)
    with (
        refusing(f"a checkpoint of tensors in {file}", "another", AGAIN, option=option),
        torch.serialization.safe_globals([Namespace]),  # training arguments
    ):
        content: Any = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    while isinstance(content, dict):
        inner = [content[name] for name in _WRAPPERS if isinstance(content.get(name), dict)]
        if not inner:
            break
        content = inner[0]
    if not (isinstance(content, dict) and any(isinstance(v, Tensor) for v in content.values())):
        received = shorten(sorted(map(str, content))[:5] if isinstance(content, dict) else content)
        raise UnsupportedModelError(
            f"{option}: expected tensors by name in {file}, received {received}; "
            f"give a checkpoint that has them, or one of {', '.join(_WRAPPERS)}"
        )
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        if not _is_whole(tensor):
            raise UnsupportedModelError(
                f"{option}: expected tensors whose numbers are all in {file}, received "
                f"{shorten(name)} {list(tensor.shape)} without; save it again with torch.save"
            )
    return tensors


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is dense and as long as its numbers: copied, it needs no more memory."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    return tensor.nbytes <= tensor.untyped_storage().nbytes()


def _read_safetensors(file: Path, option: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    read_shapes(file, option)
    received = "what safetensors cannot read"
    with refusing(f"tensors in {file}", received, "download it again", option=option):
        return load_file(file)


def shape_of(weights: Mapping[str, Tensor], name: str, n_sides: int) -> tuple[int, ...]:
    """The shape of a tensor that sizes are read from.

    Raises:
        UnsupportedModelError: no such tensor, or one of another number of sides or without numbers.
    """
    shape = tuple(weights[name].shape) if name in weights else None
    if shape is None or len(shape) != n_sides or 0 in shape:
        received = f"{list(shape)}" if shape is not None else f"only {sorted(weights)[:4]}"
        raise UnsupportedModelError(
            f"weights: expected a tensor {name} with {n_sides} sides, received "
            f"{received[:200]}; give the published file"
        )
    return shape


def count_layers(names: Iterable[str]) -> int:
    """The number of layers that names of tensors such as `layers.7.wq.weight` count.

    Raises:
        UnsupportedModelError: numbers with gaps, which would make layers without tensors.
    """
    numbers = {int(n[1]) for name in names if (n := re.match(r"layers\.(\d{1,9})\.", name))}
    if len(numbers) != max(numbers, default=-1) + 1:
        raise UnsupportedModelError(
            f"weights: expected tensors of layers 0..{len(numbers) - 1}, received one of layer "
            f"{max(numbers)}; give the published file"
        )
    return len(numbers)


def fill(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Assign tensors to a module on the meta device: all of its tensors, and no others.

    Raises:
        UnsupportedModelError: tensors that are missing, surplus or of another shape or dtype; with
            names.
    """
    used = {name: tensor for name, tensor in weights.items() if name not in _UNUSED}
    for name, tensor in used.items():
        if not tensor.is_floating_point():
            raise UnsupportedModelError(
                f"weights: expected floating-point tensors of {type(module).__name__}, received "
                f"{shorten(name)} of {tensor.dtype}; give the published file of this size"
            )
    try:
        module.load_state_dict(used, strict=True, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModelError(
            f"weights: expected the tensors of {type(module).__name__}, received others "
            f"({reason}); give the published file of this size"
        ) from error
