"""What differs between releases of transformers. Nothing else in the library asks for a version.

5.24 renamed the cache: `past_key_values` became `cache` in forward passes, outputs, layers and
`prepare_inputs_for_generation`. `CACHE` is the name in transformers' own code; a checkpoint's own
may keep the old one, so `cache_argument` asks a forward.

Raises, at import:
    UnsupportedModelError: the installed transformers is older than `OLDEST`.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

from mmaccel.errors import UnsupportedModelError

OLDEST = "5.17"
NEWEST = "5.24"  # of the releases that the tests ran with
OLD_CACHE = "past_key_values"  # transformers' own forwards take it until 5.40 too
_CACHE_NAMES = ("cache", OLD_CACHE)


def read_release(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def check_release(text: str) -> str:
    if read_release(text) < read_release(OLDEST):
        raise UnsupportedModelError(
            f"transformers: expected {OLDEST} or newer, received {text}; "
            f"pip install -U 'transformers>={OLDEST}'"
        )
    return text


def describe_untested(text: str) -> str | None:
    """What to say of a version newer than those that the tests ran with; None of the others."""
    if read_release(text) <= read_release(NEWEST):
        return None
    return (
        f"not tested with transformers {text}, the newest tested release is {NEWEST}; a model "
        "whose logits differ from its own is not accelerated, as always"
    )


def find_cache_name(text: str) -> str:
    """What transformers' own code of a version calls a cache, as an argument and in outputs."""
    return "cache" if read_release(text) >= (5, 24) else "past_key_values"


VERSION = check_release(version("transformers"))
CACHE = find_cache_name(VERSION)


@cache
def warn_if_untested() -> None:
    text = describe_untested(VERSION)
    if text is not None:
        warnings.warn(f"mmaccel: {text}", stacklevel=3)


def cache_argument(parameters: Collection[str]) -> str | None:
    """The name under which a forward with these parameters takes a cache; None if it takes none."""
    return next((name for name in _CACHE_NAMES if name in parameters), None)


def name_cache(arguments: Mapping[str, Any], parameters: Collection[str]) -> dict[str, Any]:
    """Arguments of a call whose cache is named as its function's parameters say, else as here."""
    expected = cache_argument(parameters) or CACHE
    if expected in arguments:
        return dict(arguments)
    return {expected if name in _CACHE_NAMES else name: v for name, v in arguments.items()}


def find_cache(arguments: Mapping[str, Any]) -> Any:
    caches = (arguments.get(name) for name in _CACHE_NAMES)
    return next((cache for cache in caches if cache is not None), None)
