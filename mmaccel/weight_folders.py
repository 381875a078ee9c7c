"""Folders of weights that are ours to read: heads of drafters, coarse models, codecs, scorers.

A `Schema` says what lies there: a JSON file, whose values a dataclass declares, and a file of
safetensors, or several with an index, whose headers `open_folder` reads. `WeightFile.read` compares
names and shapes with the network's outline (a module on torch's meta device), and the size with the
free memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from mmaccel.config_files import Settings, read_json, read_settings, read_value, shorten
from mmaccel.errors import OptionError, UnsupportedModelError

Module = TypeVar("Module", bound=nn.Module)
Shapes = Mapping[str, tuple[int, ...]]


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Schema(Generic[Settings]):
    """What lies in a folder of weights.

    Attributes:
        what, remedy: in messages: what it is, and how one is had.
        settings: dataclass of its configuration, whose fields declare types and ranges.
        kind: what its configuration names as "class"; "" where that is not written.
        dtype: of its tensors once they are read; None leaves each its own.
        find: where in the configuration the settings are, under their names.
        rename: a tensor's name here by its name in the file; "" leaves it out.
    """

    what: str
    settings: type[Settings]
    remedy: str
    config: str = "config.json"
    weights: str = "model.safetensors"
    kind: str = ""
    dtype: torch.dtype | None = None
    find: Callable[[dict[str, Any], Path], Mapping[str, Any]] = lambda content, file: content
    rename: Callable[[str], str] = _same
    option: str = "drafts"


@dataclass(frozen=True)
class WeightFile:
    """A file of safetensors, of which the header was read, or several, of which `file` is the one
    that there would be; `names` are the file of each tensor and its name there, by its name here;
    `asked` is what asks for tensors, in messages.
    """

    file: Path
    names: Mapping[str, tuple[Path, str]]
    shapes: Shapes
    dtype: torch.dtype | None
    asked: str
    remedy: str
    option: str

    def read(self, wanted: Shapes, optional: Collection[str] = ()) -> dict[str, Tensor]:
        """The tensors, by their names here; shapes are of all that may be there, optional ones
        included.

        Raises:
            UnsupportedModelError: other names or shapes, infinite numbers or NaN, or too little
                memory.
        """
        from safetensors import safe_open

        for name in sorted({*wanted, *self.shapes}):
            expected, stored_shape = wanted.get(name), self.shapes.get(name)
            if expected == stored_shape or (stored_shape is None and name in optional):
                continue
            shown = [
                "none" if shape is None else str(list(shape)) for shape in (expected, stored_shape)
            ]
            raise UnsupportedModelError(
                f"{self.option}: expected {shorten(name)} {shown[0]}, as {self.asked} asks, "
                f"received {shown[1]} in {self.file}; {self.remedy}"
            )
        parts = {part for part, _ in self.names.values()}
        check_memory(sum(part.stat().st_size for part in parts), str(self.file), self.option)
        tensors = {}
        with ExitStack() as stack:
            opened = {part: stack.enter_context(safe_open(part, framework="pt")) for part in parts}
            for name, (part, stored) in self.names.items():
                tensor = opened[part].get_tensor(stored)
                if self.dtype is not None and tensor.is_floating_point():
                    tensor = tensor.to(self.dtype)
                if not tensor.isfinite().all():
                    raise UnsupportedModelError(
                        f"{self.option}: expected finite weights in {self.file}, received NaN or "
                        f"infinity in {name}; copy the file again"
                    )
                tensors[name] = tensor
        return tensors


@dataclass(frozen=True)
class Opened(Generic[Settings]):
    settings: Settings
    content: dict[str, Any]
    weights: WeightFile

    def build(self, make: Callable[[Settings], Module]) -> Module:
        """The network that `make` makes of the settings, with the weights, for evaluation, on the
        CPU; errors as of `WeightFile.read`.
        """
        with torch.device("meta"):
            shapes = shapes_of(make(self.settings))
        module = make(self.settings)  # with what is no weight
        module.load_state_dict(self.weights.read(shapes), assign=True)
        return module.eval().requires_grad_(False)


def open_folder(schema: Schema[Settings], folder: str | Path, option: str = "") -> Opened[Settings]:
    """Read a folder's configuration and the header of its weights.

    Raises:
        OptionError: a missing file, or a configuration of another class.
        UnsupportedModelError: a file that cannot be read, or settings outside their ranges.
    """
    option = option or schema.option
    check_files(schema, folder, option)
    config = Path(folder) / schema.config
    content = read_json(config, option=option)
    if schema.kind and content.get("class") != schema.kind:
        raise OptionError(
            f"{option}: expected class {schema.kind!r} in {config}, received "
            f"{shorten(content.get('class'))}; {schema.remedy}"
        )
    settings = read_settings(schema.settings, schema.find(content, config), config, option)
    weights = open_weights(
        Path(folder) / schema.weights, option, schema.rename, schema.dtype, str(config)
    )
    return Opened(settings, content, weights)


def check_files(schema: Schema[Any], folder: str | Path, option: str = "") -> None:
    folder = Path(folder)
    for name in (schema.config, schema.weights):
        if not (folder / name).is_file() and not _index_of(folder / name).is_file():
            is_pickled = any(folder.glob("pytorch_model.*")) and name == schema.weights
            raise OptionError(
                f"{option or schema.option}: expected {schema.what} ({schema.config} and "
                f"{schema.weights}) in {folder}, received no {name}; "
                + ("save its pickled weights as safetensors" if is_pickled else schema.remedy)
            )


def open_weights(
    file: Path,
    option: str,
    rename: Callable[[str], str] = _same,
    dtype: torch.dtype | None = None,
    asked: str = "the model",
    remedy: str = "copy both files again",
) -> WeightFile:
    """Read the header of a file of safetensors, or of those that its index lists; for the arguments
    see `Schema` and `WeightFile`.
    """
    from safetensors import SafetensorError, safe_open

    names: dict[str, tuple[Path, str]] = {}
    shapes = {}
    parts, index = [file], _index_of(file)
    if not file.is_file() and index.is_file():
        content = read_json(index, option=option)
        listed = read_value(content, "weight_map", dict, index, option)
        parts = [file.parent / name for name in sorted({*map(str, listed.values())})]
    for part in parts:
        try:
            with safe_open(part, framework="pt") as opened:
                for stored in opened.keys():
                    name = rename(stored)
                    if name:
                        names[name] = part, stored
                        shapes[name] = tuple(opened.get_slice(stored).get_shape())
        except (SafetensorError, OSError) as error:
            raise UnsupportedModelError(
                f"{option}: expected tensors in {part}, received what safetensors cannot read "
                f"({error}); copy the file again"
            ) from error
    return WeightFile(file, names, shapes, dtype, asked, remedy, option)


def _index_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.index.json")


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def save_folder(
    schema: Schema[Any],
    folder: str | Path,
    content: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float16,
) -> None:
    """Write a folder for `open_folder`, weights first."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for name, value in tensors.items():
        kind = dtype if value.is_floating_point() else value.dtype
        written[name] = value.detach().to("cpu", kind).contiguous()
    save_file(written, folder / (schema.weights + ".tmp"))
    named = {"class": schema.kind, **content} if schema.kind else content
    text = json.dumps(named, indent=1) + "\n"
    (folder / (schema.config + ".tmp")).write_text(text, encoding="utf-8")
    for name in (schema.weights, schema.config):
        os.replace(folder / (name + ".tmp"), folder / name)


def available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    entries = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(entries[0][1]) * 1024 if entries else None


def check_memory(
    n_bytes: int, what: str, option: str = "model", device: Any = "cpu", remedy: str = ""
) -> None:
    """UnsupportedModelError for more than the free memory, in main memory or of a CUDA device."""
    places = {"": available_memory()}
    if torch.device(device).type == "cuda":
        places[f" on {device}"] = torch.cuda.mem_get_info(device)[0]
    for where, free in places.items():
        if free is not None and n_bytes > free:
            raise UnsupportedModelError(
                f"{option}: expected {n_bytes / 2**30:.1f} GiB of free memory{where} for {what}, "
                f"received {free / 2**30:.1f} GiB; "
                + (remedy or "free memory, or take a smaller dtype or model")
            )
