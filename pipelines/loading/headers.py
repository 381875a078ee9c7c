"""Checks of a checkpoint before a model is built from it: no code, sane sizes, enough memory.

Everything here reads headers alone: the JSON files of a folder, and names and shapes of its
tensors. `check_folder` refuses files that no library should open. `check_sizes` compares a
configuration with the tensors: a library that is asked for more layers or larger tables than there
are would fill gigabytes with random numbers before it says that they are missing.
"""

from __future__ import annotations

import math
import os
import re
import stat
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmaccel.config_files import Range, check_ranges, check_regular, read_json, shorten
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.loading.implementations import check_implementations
from mmaccel.pipelines.loading.refusal import CONFIGS, refusing

_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model")
_VOCABULARY_LIMIT = 64 * 2**20  # bytes; the largest published one has 33 MB
_TEMPLATES = "additional_chat_templates"  # a folder of them
_TEMPLATE_LIMIT = 2**20  # bytes of a chat template; the longest published ones have 30 000
_INDEX_LIMIT = 64 * 2**20
_HEADER_LIMIT = 32 * 2**20  # bytes; 100 000 tensors have 12 MB
_FILES = (".json", ".safetensors", ".bin", ".jinja", ".txt", ".model")  # never folders

_WIDTH = Range(1, 2**18)
RANGES: Mapping[str, Range] = {  # of config.json of transformers and diffusers
    r"vocab_size|num_embeddings|codebook_size": Range(1, 2**22),
    r"num_(attention_|key_value_|kv_)?heads|n_head": Range(1, 4096),
    r"hidden_size|intermediate_size|n_embd|n_inner|d_model|d_ff|d_kv|head_dim": _WIDTH,
    r"embed_dim|base_channels|latent_channels|attention_head_dim": _WIDTH,
    r"channel_multiplier|block_out_channels": Range(1, 2**14, length=16),
    r"quantization_levels": Range(2, 2**12, length=16, product=2**20),
    r"num_hidden_layers|n_layer|num_layers": Range(1, 1024),
    r"image_size|resolution|sample_size": Range(1, 2**16),
    r"patch_size|tubelet_size|temporal_patch_size": Range(1, 2**12),
    r"n_positions": Range(1, 2**24),
    r"max_position_embeddings": Range(1, 2**31),
    r"num_image_tokens": Range(1, 2**16),
    r"sampling_rate": Range(1, 10**6),
    r"downsampling_ratios": Range(1, 2**10, length=16),
    # any other name that counts parts: only numbers that would take minutes to build
    r".*_(layers|blocks|experts|stages|levels|codebooks)|depth": Range(
        -math.inf, 1024, length=4096, numbers_only=False
    ),
}
_DIVISIBLE = (  # a number, its divisor, and the name that lifts the rule
    ("hidden_size", "num_attention_heads", "head_dim"),
    ("num_attention_heads", "num_key_value_heads", ""),
    ("n_embd", "n_head", ""),
)
_MOST_ENTRIES = 1024  # of a list: libraries build a part of a model for each
_LAYERS = r".*layers.*|n_layer|depth|num_res_blocks"
_FEW_LAYERS = 64  # built in a second; layers that share their tensors count once in a file
_SLACK = 2**24  # numbers that a model may have beyond twice those of its file
_BUFFERS = 2**28  # bytes of tables that a model computes beyond the size of its file
AGAIN = "download it again, or save its tensors as .safetensors"
_PACKED = 8  # numbers in one of a quantized file


def check_folder(folder: Path, option: str = "model") -> None:
    """Refuse a folder with files that a library would wait for, or could not read.

    Args:
        folder: of a checkpoint or of a part of it; of its subfolders, that of chat templates is
            looked at.
        option: name of the option in messages.

    Raises:
        UnsupportedModelError: a FIFO or device, a folder under a file's name, a vocabulary or a
            chat template that is too long, a configuration that `read_json` refuses, or with
            numbers out of `RANGES`, or a name that `check_implementations` refuses.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise UnsupportedModelError(
            f"{option}: expected a folder that save_pretrained wrote, received {folder} "
            f"({error.strerror}); check the path"
        ) from error
    for entry in entries:
        try:
            mode = (found := entry.stat()).st_mode
            size = found.st_size
        except OSError:  # a link to nothing
            continue
        file = Path(entry.path)
        if not stat.S_ISREG(mode) and (not stat.S_ISDIR(mode) or file.suffix in _FILES):
            check_regular(file, option)
        if entry.name in CONFIGS:
            content = read_json(file, option=option)
            check_ranges(content, RANGES, file, option)
            check_implementations(content, file, option)
        if entry.name == _TEMPLATES and stat.S_ISDIR(mode):
            check_folder(file, option)
        most = _TEMPLATE_LIMIT if file.suffix == ".jinja" else _VOCABULARY_LIMIT
        if (file.suffix == ".jinja" or entry.name in _VOCABULARIES) and size > most:
            raise UnsupportedModelError(
                f"{option}: expected at most {most} bytes in {file}, received {size}; copy the "
                "folder again"
            )


@dataclass(frozen=True)
class Header:
    """What the files of a model's weights say before they are read.

    Attributes:
        files: of the weights.
        shapes: of the tensors by name.
        n_bytes: of all files.
    """

    files: tuple[Path, ...]
    shapes: Mapping[str, tuple[int, ...]]
    n_bytes: int


def read_header(
    folder: Path, config: Mapping[str, Any], option: str = "model", variant: str | None = None
) -> Header:
    """Read names and shapes of a folder's tensors.

    Args:
        folder: written by `save_pretrained`.
        config: content of its `config.json`.
        option: name of the option in messages.
        variant: of the weights, such as "fp16".

    Raises:
        UnsupportedModelError: no weights, an index that names other files than shards in this
            folder, a missing shard, or a file that safetensors refuses.
    """
    files = tuple(_weight_files(folder, config, option, variant))
    shapes: dict[str, tuple[int, ...]] = {}
    n_bytes = 0
    for file in files:
        n_bytes += stored_bytes(file, option)
        read = read_shapes if file.suffix == ".safetensors" else _pickled_shapes
        shapes |= read(file, option)
    return Header(files, shapes, n_bytes)


def _weight_files(
    folder: Path, config: Mapping[str, Any], option: str, variant: str | None
) -> Iterator[Path]:
    own = config.get("transformers_weights")
    stems = ("model", "diffusion_pytorch_model")
    infix = "" if variant is None else f".{variant}"
    names = []
    for kind, own_stems in (("safetensors", stems), ("bin", ("pytorch_model", stems[1]))):
        for stem in own_stems:
            names += [f"{stem}{infix}.{kind}", f"{stem}.{kind}.index{infix}.json"]
    found = [str(own)] if own else [name for name in names if os.path.exists(folder / name)]
    if not found or not is_plain(found[0]):
        received = shorten(found[0]) if found else f"{sorted(os.listdir(folder))[:5]}"
        raise UnsupportedModelError(
            f"{option}: expected weights in {folder}, such as model.safetensors, received "
            f"{received}; copy the folder again"
        )
    file = folder / found[0]
    check_regular(file, option)
    if file.suffix != ".json":
        yield file
        return
    shards = read_json(file, _INDEX_LIMIT, option).get("weight_map")
    known = list(shards.values()) if isinstance(shards, dict) else []
    for name in dict.fromkeys(map(str, known)) or [str(shards)]:
        if not is_plain(name):
            raise UnsupportedModelError(
                f"{option}: expected names of files in {folder} in the weight_map of {file.name}, "
                f"received {shorten(name)}; copy the folder again"
            )
        check_regular(folder / name, option)
        yield folder / name


def is_plain(name: str) -> bool:
    """Whether a name is that of a file or folder right inside its folder."""
    return name not in ("", ".", "..") and not re.search(r"[/\\\0]", name)


def read_shapes(file: Path, option: str = "model") -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a safetensors file, from its header.

    Raises:
        UnsupportedModelError: a header that is too long, or that safetensors refuses.
    """
    from safetensors import safe_open

    received = "what safetensors cannot read"
    with refusing(f"tensors in {file}", received, "download it again", option=option):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
        if length > _HEADER_LIMIT:
            raise ValueError(f"a header of {length} bytes")
        with safe_open(file, framework="pt") as tensors:
            return {n: tuple(tensors.get_slice(n).get_shape()) for n in tensors.keys()}


def _pickled_shapes(file: Path, option: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a `.bin` file; the numbers of zip files are not read."""
    with refusing(f"a checkpoint of tensors in {file}", "another", AGAIN, option=option):
        content = torch.load(
            file, map_location="meta", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    tensors = content.items() if isinstance(content, dict) else ()
    return {str(name): tuple(t.shape) for name, t in tensors if isinstance(t, torch.Tensor)}


def stored_bytes(file: Path, option: str = "model") -> int:
    """Bytes that the reader of a file of tensors may fill.

    Raises:
        UnsupportedModelError: a zip file with compressed members, which may be far longer than the
            file.
    """
    if file.suffix == ".safetensors" or not zipfile.is_zipfile(file):
        return file.stat().st_size
    with refusing(f"a checkpoint of tensors in {file}", "another", AGAIN, option=option):
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED:
            raise UnsupportedModelError(
                f"{option}: expected members stored as torch.save does in {file}, received "
                f"{shorten(member.filename)} compressed to {member.compress_size} of "
                f"{member.file_size} bytes; save its tensors as .safetensors"
            )
    return sum(member.file_size for member in members)


def available_memory() -> int | None:
    """Bytes of main memory that can be filled without swapping; None where nothing tells."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else None


def free_device_memory(device: Any) -> int | None:
    """Bytes that are free on a CUDA device; None for other devices, whose models the CPU holds."""
    place = torch.device(device)
    return int(torch.cuda.mem_get_info(place)[0]) if place.type == "cuda" else None


def check_memory(
    n_bytes: int,
    what: str,
    option: str = "model",
    dtype: torch.dtype | None = None,
    device: Any = "cpu",
) -> None:
    """Refuse to fill more memory than there is, in main memory and on the device.

    Args:
        n_bytes: of the weights.
        what: description of the model in messages.
        option: name of the option in messages.
        dtype: of the model, if it may be another one.
        device: where the model will be.

    Raises:
        UnsupportedModelError: with both numbers.
    """
    for where, free in (("", available_memory()), (f" on {device}", free_device_memory(device))):
        if free is None or n_bytes <= free:
            continue
        remedy = "free memory, or take a smaller dtype or model"
        if dtype == torch.float32:
            half = n_bytes / 2
            fits = "which fits" if half <= free else "still too much"
            remedy = f"dtype bf16 takes {half / 2**30:.1f} GiB, {fits}; or take a smaller model"
        raise UnsupportedModelError(
            f"{option}: expected {n_bytes / 2**30:.1f} GiB of free memory{where} for {what}, "
            f"received {free / 2**30:.1f} GiB; {remedy}"
        )


def check_sizes(
    kind: Any,
    folder: Path,
    dtype: torch.dtype,
    option: str = "model",
    variant: str | None = None,
    device: Any = "cpu",
) -> None:
    """Compare the configuration of a checked folder with its tensors and with free memory.

    The model's outline, with tensors that have shapes but no numbers, is built where numbers in
    ranges and the number of layers bound the time for it.

    Args:
        kind: class of transformers or diffusers.
        folder: written by `save_pretrained`.
        dtype: of the model.
        option: name of the option in messages.
        variant: of the weights, such as "fp16".
        device: where the model will be; None leaves the memory to accelerate.

    Raises:
        UnsupportedModelError: heads that do not divide a width, more layers or numbers than the
            file has, or too little memory.
    """
    file = folder / "config.json"
    config = read_json(file, option=option)
    _check_structure(config, file, option)
    header = read_header(folder, config, option, variant)
    _check_layers(config, header, file, option)
    outline = None if config.get("auto_map") else build_outline(kind, folder)
    if outline is None:
        if device is not None:
            check_memory(header.n_bytes, str(folder), option)
        return
    shapes = {name: tuple(p.shape) for name, p in outline.named_parameters()}
    tables = sum(b.numel() * b.element_size() for b in outline.buffers())
    wanted = sum(map(math.prod, shapes.values()))
    there = min(sum(map(math.prod, header.shapes.values())), header.n_bytes)
    there *= _PACKED if config.get("quantization_config") else 1
    if wanted > 2 * there + _SLACK or tables > header.n_bytes + _BUFFERS:
        raise UnsupportedModelError(
            f"{option}: expected {there} numbers, those in {header.files[0].name}, received "
            f"{file} that asks for {wanted}{_largest(shapes, header.shapes)} and "
            f"{tables} bytes of tables; copy config.json again"
        )
    if device is not None:
        check_memory(wanted * dtype.itemsize + tables, str(folder), option, dtype, device)


def build_outline(kind: Any, folder: Path) -> Any:
    """A model without numbers; None where it cannot be built, for reasons its library will say."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if hasattr(kind, "load_config"):  # diffusers
                return kind.from_config(kind.load_config(folder, local_files_only=True))
            options = dict(local_files_only=True, trust_remote_code=False)
            if hasattr(kind, "_model_mapping"):
                from transformers import AutoConfig

                config = AutoConfig.from_pretrained(folder, **options)
                return kind.from_config(config, trust_remote_code=False)
            return kind(kind.config_class.from_pretrained(folder, **options))
    except Exception:
        return None


def _check_structure(config: Mapping[str, Any], file: Path, option: str) -> None:
    """Check that numbers of heads divide, and how long lists are, also in inner configurations."""
    for whole, part, lifted in _DIVISIBLE:
        a, b = config.get(whole), config.get(part)
        if type(a) is int and type(b) is int and a % b and config.get(lifted) is None:
            raise UnsupportedModelError(
                f"{option}: expected {whole} to be a multiple of {part} in {file}, received {a} "
                f"and {b}; copy the folder again"
            )
    for name, value in config.items():
        if isinstance(value, dict):
            _check_structure(value, file, option)
        elif isinstance(value, list) and len(value) > _MOST_ENTRIES:
            raise UnsupportedModelError(
                f"{option}: expected at most {_MOST_ENTRIES} entries of {shorten(name)} in {file}, "
                f"received {len(value)}; copy the folder again"
            )


def _check_layers(config: Mapping[str, Any], header: Header, file: Path, option: str) -> None:
    """Check that no configuration has more layers than the names of the tensors count."""
    numbers = (int(n) for name in header.shapes for n in re.findall(r"\.(\d{1,9})\.", name))
    most = max(1 + max(numbers, default=-1), _FEW_LAYERS)
    for name, value in config.items():
        if isinstance(value, dict):
            _check_layers(value, header, file, option)
        elif re.fullmatch(_LAYERS, name) and type(value) is int and value > most:
            raise UnsupportedModelError(
                f"{option}: expected at most {most} layers, as many as in {header.files[0].name}, "
                f"received {name} {value} in {file}; copy config.json again"
            )


def _largest(wanted: Mapping[str, tuple[int, ...]], there: Mapping[str, tuple[int, ...]]) -> str:
    """The largest tensor that the file has in another shape or not at all."""
    others = {n: shape for n, shape in wanted.items() if there.get(n) != shape}
    if not others:
        return ""
    name = max(others, key=lambda n: math.prod(others[n]))
    return f", such as {name} {list(others[name])} in place of {list(there.get(name, ()))}"
