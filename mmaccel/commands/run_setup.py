"""What `generate` and `bench` do before anything is generated: checks and loading."""

from __future__ import annotations

import tempfile
from ast import literal_eval
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.commands.collector import wake_collector
from mmaccel.errors import OptionError
from mmaccel.results import EXACT_DTYPE

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image import TextToImage

DTYPES = (EXACT_DTYPE, "bfloat16", "float16")


def parse_window(text: str | None) -> int | str | None:
    """The value of `--window`: an integer, or the text itself for the policy to judge."""
    try:
        return None if text is None else int(text)
    except ValueError:
        return text


def parse_fields(texts: list[str]) -> dict[str, Any]:
    """The values of `--set name=value`: Python literals, or texts.

    Raises:
        OptionError: no name, no value, or a name twice.
    """
    fields: dict[str, Any] = {}
    for text in texts:
        name, is_given, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not is_given or not name.isidentifier() or name in fields:
            raise OptionError(
                f"--set: expected name=value, each name once, received {text!r}; "
                "write for example --set gamma=0.2"
            )
        try:
            fields[name] = literal_eval(value.strip())
        except (ValueError, SyntaxError):
            fields[name] = value.strip()
    return fields


def pick_name(policy: str | None, options: dict[str, Any], kind: str) -> tuple[str, dict[str, Any]]:
    """The short name of a policy for a model of a kind, and its options; an exact one by default.

    Raises:
        OptionError: a policy of another kind.
    """
    from mmaccel.catalog import find_policy

    if policy is not None:
        find_policy(policy, kind)
        return policy, options
    if kind == "window":
        return "jacobi", options
    return "lossless-unmask", {"order": "halton"} | options


def given(**options: Any) -> dict[str, Any]:
    """The options that were given on the command line."""
    return {name: value for name, value in options.items() if value is not None}


def check_count(name: str, value: int) -> None:
    """Refuse a number below 1.

    Raises:
        OptionError: with the option's name.
    """
    if value < 1:
        raise OptionError(f"--{name}: expected at least 1, received {value}; ask for 1 or more")


def open_folder(folder: Path, option: str = "--out") -> None:
    """Make a folder for results and make sure that it can be written; `option` named it.

    Raises:
        OSError: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"{option}: expected a folder that can be written, received {str(folder)!r} "
            f"({error.strerror}); choose another"
        ) from error


def check_file_name(option: str, file: Path | None) -> None:
    """Refuse what no file can be written under; None is fine.

    Raises:
        OptionError: a folder, a device, no name, or "-", as results go into files alone.
    """
    if file is None:
        return
    if not file.name or str(file) == "-" or (file.exists() and not file.is_file()):
        raise OptionError(
            f"{option}: expected a file name, received {str(file)!r}; name a file in a folder"
        )


def parse_size(text: str | None) -> tuple[int, int] | None:
    """The value of `--size`: `768` or `1024x768`, width first.

    Raises:
        OptionError: anything else.
    """
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise OptionError(
            f"--size: expected pixels such as 768 or 1024x768, received {text!r}; width comes first"
        )
    return int(parts[0]), int(parts[-1])


def parse_dtype(name: str) -> Any:
    """The value of `--dtype` as torch has it.

    Raises:
        OptionError: none of `DTYPES`.
    """
    if name not in DTYPES:
        raise OptionError(
            f"--dtype: expected one of {', '.join(DTYPES)}, received {name!r}; "
            f"{EXACT_DTYPE} keeps every promise"
        )
    import torch

    return getattr(torch, name)


def open_pipeline(
    model: str,
    device: str,
    dtype: str = EXACT_DTYPE,
    *,
    size: str | None = None,
    decoder: Path | None = None,
    family: str | None = None,
    engine: str = "auto",
) -> TextToImage:
    """Load a text-to-image model on a device.

    Args:
        model: name, folder, file, or id of the hub.
        device: as torch names it.
        dtype: of the generator, one of `DTYPES`.
        size, decoder, family, engine: as on the command line.

    Raises:
        OptionError: no such model, device, dtype, size, family or engine.
        MissingBackendError: engine "graph" on another device than CUDA.
    """
    pixels = parse_size(size)
    kind = parse_dtype(dtype)
    from transformers.utils import logging

    from mmaccel.pipelines.text_to_image import TextToImage

    logging.disable_progress_bar()
    pipe = TextToImage.from_pretrained(
        model,
        device=device,
        dtype=kind,
        size=pixels,
        decoder=decoder,
        family=family,
        engine=engine,
    )
    wake_collector()
    return pipe
