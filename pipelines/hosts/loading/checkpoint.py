"""Loading of checkpoints: folders of transformers and diffusers, and single files of tensors."""

from __future__ import annotations

import logging
import re
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.checks import check_fields, check_path, show, within
from mmaccel.config_files import read_json, shorten
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.options import LoadOptions
from mmaccel.pipelines.hosts.loading.refusal import check_folder, refusing
from mmaccel.pipelines.hosts.transformers_release import warn_if_untested
from mmaccel.weight_folders import check_memory


@dataclass(frozen=True, kw_only=True)
class LoadConfig(LoadOptions):
    """`LoadOptions` that were read: where "auto" leads, and what images need beside.

    Attributes:
        size: width and height of the images in pixels; None takes the model's default.
        decoder: a file with the image decoder, for checkpoints that have none.
    """

    device: Any = "cpu"
    dtype: Any = torch.float32
    size: tuple[int, int] | None = within(None, 1, hint="write for example (768, 768)")
    decoder: Path | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.token, str | None):
            raise OptionError("token: expected a text or None, received another value")
        check_fields(self)
        if self.decoder is not None:
            check_path("decoder", self.decoder, "file")


def load_model(
    kind: Any, folder: Path, load_config: LoadConfig, optional: str = "$^", option: str = "model"
) -> Any:
    """Load a model of a class of transformers or diffusers from a folder of `save_pretrained`, in
    evaluation mode. Tensors that are missing or surplus, unless their names match `optional`, or
    of another shape, are refused with their names; messages name `option`.
    """
    warn_if_untested()
    check_folder(folder, option)
    is_mapped = load_config.device_map is not None
    if not is_mapped:
        _check_memory(kind, folder, load_config, option)
    options: dict[str, Any] = {"local_files_only": True, "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True  # refused below, with names
    options |= {} if load_config.variant is None else {"variant": load_config.variant}
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
    for what, keys, unless in (
        ("of another shape", reshaped, "$^"),
        ("missing", set(missing) - set(reshaped), optional),
        ("surplus", surplus, optional),
    ):
        names = sorted(name for name in keys if not re.search(unless, name))
        if names:
            raise UnsupportedModelError(
                f"{option}: expected the tensors of {kind.__name__} in {folder}, received "
                f"{len(names)} {what}, such as {names[0]}; copy the folder again"
            )
    return (model if is_mapped else model.to(load_config.device)).eval()


def _check_memory(kind: Any, folder: Path, load_config: LoadConfig, option: str) -> None:
    """Refuse a model above the free memory: its files' bytes, or its outline's in the dtype."""
    config = read_json(folder / "config.json", option=option)
    outline = None
    if not (config.get("auto_map") or config.get("quantization_config")):
        outline = build_outline(kind, folder)
    remedy = ""
    if outline is None:
        files = [file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin")]
        n_bytes = sum(file.stat().st_size for file in files)
    else:
        n_bytes = sum(p.numel() for p in outline.parameters()) * load_config.dtype.itemsize
        n_bytes += sum(b.nbytes for b in outline.buffers())
        if load_config.dtype == torch.float32:
            remedy = f"dtype bf16 takes {n_bytes / 2**31:.1f} GiB; or take a smaller model"
    check_memory(n_bytes, str(folder), option, load_config.device, remedy)


def build_outline(kind: Any, folder: Path) -> Any:
    """A model without numbers; None where it cannot be built, for reasons its library will say."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if hasattr(kind, "load_config"):  # diffusers
                return kind.from_config(kind.load_config(folder, local_files_only=True))
            from transformers import AutoConfig

            config_class = getattr(kind, "config_class", None) or AutoConfig
            config = config_class.from_pretrained(folder, local_files_only=True)
            return (kind if config_class is not AutoConfig else kind.from_config)(config)
    except Exception:
        return None


def refuse_device_map(load_config: LoadConfig, family: str) -> None:
    """Refuse a device map for a family whose files transformers does not load."""
    if load_config.device_map is not None:
        raise UnsupportedModelError(
            f"device_map: expected none for {family}, whose files are not loaded by transformers, "
            f"received {show(load_config.device_map)}; give device="
        )


@contextmanager
def _without_report(module: str = "modeling_utils") -> Iterator[None]:
    """Keep transformers from writing a table of what `load_model` says in one line, or that it does
    not know the type of a model whose tokenizer it reads (`configuration_utils`).
    """
    logger = logging.getLogger(f"transformers.{module}")
    logger.addFilter(_is_error)  # a level of its own would turn on another report
    try:
        yield
    finally:
        logger.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def load_config_file(folder: Path, load_config: LoadConfig) -> Any:
    from transformers import AutoConfig

    return load_processor(AutoConfig, folder, load_config)


def load_processor(kind: Any, folder: Path, load_config: LoadConfig) -> Any:
    """Load a processor, tokenizer or configuration of transformers."""
    check_folder(folder)
    with (
        refusing(
            f"the {kind.__name__} in {folder}",
            "none that transformers can read",
            "copy the folder again, with its configuration, tokenizer and processor files",
            folder=folder,
        ),
        _without_report("configuration_utils"),
    ):
        return kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=load_config.trust_remote_code
        )


def load_causal_lm(folder: Path, load_config: LoadConfig) -> tuple[Any, Any]:
    """Load a causal LM of transformers and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = load_processor(AutoTokenizer, folder, load_config)
    return load_model(AutoModelForCausalLM, folder, load_config), tokenizer


def check_size(size: tuple[int, int] | None, own: tuple[int, int]) -> None:
    """Refuse a size for a model that has one size."""
    if size not in (None, own):
        raise OptionError(
            f"size: expected {own[0]}x{own[1]}, the only one of this model, received "
            f"{'x'.join(map(str, size or ()))}; leave it out"
        )


def count_tokens(size: tuple[int, int], step: int) -> tuple[int, int]:
    """Rows and columns of tokens for a size in pixels, with `step` pixels per token."""
    width, height = size
    if width < step or height < step or width % step or height % step:
        raise OptionError(
            f"size: expected multiples of {step}, received {width}x{height}; "
            f"for example {max(1, round(width / step)) * step}x"
            f"{max(1, round(height / step)) * step}"
        )
    return height // step, width // step


def check_prompt(text: Any, tokenizer: Any = None, what: str = "a prompt") -> str:
    """A user's text without blanks at both ends.

    OptionError: an empty one, an incomplete character, or a control token of the tokenizer.
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


# keys that hold the weights of a checkpoint
_WRAPPERS = ("vae", "model", "module", "state_dict", "ema")
_UNUSED = ("quantize.codebook_used", "freqs_cis")  # training statistics, and a computed table


def read_weights(file: str | Path, option: str = "weights") -> dict[str, Tensor]:
    """Read the tensors of a `.pt` or `.safetensors` file, also below one of the usual keys.

    No code of the file runs. Zip files, as torch.save writes them, are mapped into memory.
    """
    file = Path(file)
    if not file.is_file():
        raise OptionError(f"{option}: expected a file, received {str(file)!r}; check the path")
    check_memory(file.stat().st_size, str(file), option)
    with (
        refusing(f"a checkpoint of tensors in {file}", "another", "copy it again", option=option),
        torch.serialization.safe_globals([Namespace]),  # training arguments
    ):
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        content: Any = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    while isinstance(content, dict):
        inner = [content[name] for name in _WRAPPERS if isinstance(content.get(name), dict)]
        if not inner:
            break
        content = inner[0]
    tensors = content.items() if isinstance(content, dict) else ()
    weights = {str(name): value for name, value in tensors if isinstance(value, Tensor)}
    if not weights:
        raise UnsupportedModelError(
            f"{option}: expected tensors by name in {file}, received "
            f"{shorten([str(name) for name, _ in tensors][:5] or content)}; give a checkpoint that "
            f"has them, or one of {', '.join(_WRAPPERS)}"
        )
    return weights


def shape_of(weights: Mapping[str, Tensor], name: str, n_sides: int) -> tuple[int, ...]:
    """The shape of a tensor that sizes are read from."""
    shape = tuple(weights[name].shape) if name in weights else None
    if shape is None or len(shape) != n_sides or 0 in shape:
        received = f"{list(shape)}" if shape is not None else f"only {sorted(weights)[:4]}"
        raise UnsupportedModelError(
            f"weights: expected a tensor {name} with {n_sides} sides, received "
            f"{received[:200]}; give the published file"
        )
    return shape


def count_layers(names: Iterable[str]) -> int:
    """The number of layers that names of tensors such as `layers.7.wq.weight` count."""
    return len({match[1] for name in names if (match := re.match(r"layers\.(\d+)\.", name))})


def rename(
    weights: Mapping[str, Tensor], layer: Mapping[str, str], outer: Mapping[str, str]
) -> dict[str, Tensor]:
    """Published tensors under the names of a decoder of transformers; others keep theirs.

    `weights` of layers are named `layers.7.attention.wq.weight`; `layer` has "attention.wq" and
    transformers' name, `outer` the tensors outside layers, without ".weight" where they have it.
    """
    renamed = {}
    for name, value in weights.items():
        base = name.removesuffix(".weight")
        new = outer.get(base)
        prefix = re.match(r"layers\.\d+\.", name)
        if prefix and base[prefix.end() :] in layer:
            new = f"model.{prefix[0]}{layer[base[prefix.end() :]]}"
        renamed[name if new is None else new + name[len(base) :]] = value
    return renamed


def fill(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Assign tensors to a module on the meta device: all of its tensors, and no others."""
    used = {name: tensor for name, tensor in weights.items() if name not in _UNUSED}
    try:
        module.load_state_dict(used, strict=True, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModelError(
            f"weights: expected the tensors of {type(module).__name__}, received others "
            f"({reason}); give the published file of this size"
        ) from error
