"""Folders of strangers: no code of theirs runs unasked, and what a library raises is one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmaccel.config_files import read_json, shorten
from mmaccel.errors import MissingBackendError, MMAccelError, UnsupportedModelError

CONFIGS = (  # JSON objects that transformers, diffusers or mmaccel read
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    "scheduler_config.json",
    "model_index.json",
)
_IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")
_BUILT_IN = ("eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")
_FLASH = re.compile(r"flash_attention_(\d)")


def check_folder(folder: Path, option: str = "model") -> None:
    """Refuse a folder whose configurations cannot be read, or whose code transformers downloads.

    It downloads and runs compiled code for a name of attention or experts that it does not have: a
    repository of kernels, or `flash_attention_2` where that is not installed.
    """
    if not folder.is_dir():
        raise UnsupportedModelError(
            f"{option}: expected a folder that save_pretrained wrote, received {folder}; check the "
            "path"
        )
    for file in (folder / name for name in CONFIGS):
        for name in _find_implementations(read_json(file, option, may_lack=True)):
            if not _is_here(name):
                raise UnsupportedModelError(
                    f"{option}: expected attention and experts as one of {', '.join(_BUILT_IN)} in "
                    f"{file}, received {shorten(name)}, code that transformers would download; "
                    "delete that line"
                )


def _find_implementations(value: Any, is_named: bool = False) -> Iterator[str]:
    """Names of attention and experts anywhere in a configuration."""
    if isinstance(value, dict):
        for key, inner in value.items():
            inside = is_named or _IMPLEMENTATION.fullmatch(key) is not None
            yield from _find_implementations(inner, inside)
    elif isinstance(value, list):
        for inner in value:
            yield from _find_implementations(inner, is_named)
    elif is_named and isinstance(value, str):
        yield value


def _is_here(name: str) -> bool:
    flash = _FLASH.fullmatch(name)
    if flash is None:
        return name in _BUILT_IN
    from transformers import utils

    is_installed = getattr(utils, f"is_flash_attn_{flash[1]}_available", None)
    return is_installed is not None and bool(is_installed())


@contextmanager
def refusing(
    expected: str, received: str, remedy: str, *, option: str = "model", folder: Path | None = None
) -> Iterator[None]:
    """Turn what a library raises for files that it cannot read, also a panic of Rust, into one
    UnsupportedModelError; a package that is not installed into MissingBackendError.

    The message has `expected`, `received` with the library's reason, and `remedy`; `folder` is a
    checkpoint whose code the library may ask to run.
    """
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # of the library tokenizers
        if isinstance(error, MMAccelError) or not (is_panic or isinstance(error, Exception)):
            raise
        if isinstance(error, ImportError) and error.name:
            raise MissingBackendError(
                f"{option}: expected the package {error.name}, received none; "
                f"pip install {error.name}"
            ) from error
        code = find_code(folder) if folder is not None and "trust_remote" in str(error) else []
        if code:
            raise UnsupportedModelError(
                f"{option}: expected classes that transformers has in {folder}, received Python "
                f"code of the checkpoint ({', '.join(code)[:200]}); read that code, then pass "
                "trust_remote_code=True (--trust-remote-code) if you trust it"
            ) from error
        raise UnsupportedModelError(
            f"{option}: expected {expected}, received {received} ({say_reason(error)}); {remedy}"
        ) from error


def say_reason(error: BaseException) -> str:
    """What a library says, on one line, without escapes and without advice to run pickles."""
    text = re.sub(r"\x1b\[[\d;]*m", "", str(error))
    if (call := re.search(r"GLOBAL (\S+)", text)) is not None:
        return f"a pickle that calls {call[1]}"
    text = text.rpartition("WeightsUnpickler error: ")[2]
    text = " ".join(f"{type(error).__name__}: {text}".split())
    return "".join(c for c in text if c.isprintable())[:200]


def find_code(folder: Path) -> list[str]:
    """Python classes that a folder's configurations name, as "config.json: modeling.Model"."""
    code = []
    for name in CONFIGS:
        named = read_json(folder / name, may_lack=True).get("auto_map")
        values = named.values() if isinstance(named, dict) else named
        for value in values if isinstance(values, Iterable) else ():
            classes = value if isinstance(value, list) else [value]
            code += [f"{name}: {shorten(c)[1:-1]}" for c in classes if isinstance(c, str)]
    return list(dict.fromkeys(code))
