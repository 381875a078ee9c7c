"""Which attention and experts a checkpoint's configuration may ask transformers for.

A name that transformers does not have itself makes it download and run compiled code: a repository
of kernels, or `flash_attention_2` where the package flash_attn is not installed. Who loads a model
by transformers and attaches to it may ask for anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmaccel.config_files import shorten
from mmaccel.errors import UnsupportedModelError

_KEY = re.compile(r"_?(attn|experts)_implementation(_internal)?")
_BUILT_IN = ("eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")
_FLASH = re.compile(r"flash_attention_(\d)")


def check_implementations(content: Mapping[str, Any], file: Path, option: str = "model") -> None:
    """Refuse a configuration that makes transformers download compiled code.

    Args:
        content: of the file; configurations inside it are checked too.
        file: of the configuration, for messages.
        option: name of the option in messages.

    Raises:
        UnsupportedModelError: a name that is neither built in nor of an installed package.
    """
    for key, value in content.items():
        if _KEY.fullmatch(key):
            wrong = next((name for name in _names(value) if not _is_here(name)), None)
            if wrong is not None:
                raise UnsupportedModelError(
                    f"{option}: expected {key} as one of {', '.join(_BUILT_IN)} in {file}, "
                    f"received {shorten(wrong)}, code that transformers would download; delete "
                    "that line"
                )
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                check_implementations(inner, file, option)


def _names(value: Any) -> Iterator[str]:
    """All texts inside a value: it may be a name, or names by sub-configuration."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _names(inner)


def _is_here(name: str) -> bool:
    flash = _FLASH.fullmatch(name)
    if flash is None:
        return name in _BUILT_IN
    from transformers import utils

    is_installed = getattr(utils, f"is_flash_attn_{flash[1]}_available", None)
    return is_installed is not None and bool(is_installed())
