"""Opens a model that reads prompts from the values of command-line options."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mmaccel.checks import show
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_SIDE
from mmaccel.options import LoadOptions

# tables write 768.0
_SIZE = re.compile(r"\s*(\d{1,5})(?:\.0*)?\s*(?:[xX]\s*(\d{1,5})(?:\.0*)?\s*)?")


def pick_name(policy: str | None, options: dict[str, Any], kind: str) -> tuple[str, dict[str, Any]]:
    """The short name of a policy and its options; by default an exact policy.

    Args:
        policy: short name; None takes the default.
        options: fields of the policy.
        kind: "window" or "canvas", of the model.

    Raises:
        OptionError: a policy of another kind.
    """
    from mmaccel.catalog import find_policy

    if policy is not None:
        find_policy(policy, kind)
        return policy, options
    if kind == "window":
        return "jacobi", options
    return "lossless-unmask", options


def parse_size(value: Any, name: str = "--size") -> tuple[int, int] | None:
    """A size as `--size` or a row has it: 768, "1024x768" or [1024, 768], width first.

    Args:
        value: None stays None.
        name: begins the message.

    Raises:
        OptionError: anything else.
    """
    if value is None:
        return None
    text = "x".join(map(str, value)) if isinstance(value, list) else str(value)
    found = _SIZE.fullmatch(text)
    width, height = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE):
        raise OptionError(
            f"{name}: expected pixels such as 768 or 1024x768, up to {MAX_SIDE}, received "
            f"{show(value)}; width comes first"
        )
    return width, height


def place(load: LoadOptions) -> LoadOptions:
    """Options whose device and dtype are names, "auto" replaced by what it means here.

    Raises:
        OptionError: no such device on this machine, or no such dtype.
    """
    from mmaccel.pipelines.hosts.loading.placement import choose_placement, name_dtype

    device, dtype = choose_placement(load.device, load.dtype)
    return replace(load, device=str(device), dtype=name_dtype(dtype))


def load_keywords(load: LoadOptions) -> dict[str, Any]:
    """Options as keywords of a `from_pretrained`."""
    return {each.name: getattr(load, each.name) for each in fields(load)}


def open_pipeline(
    model: str, load: LoadOptions, *, size: str | None = None, decoder: Path | None = None
) -> Any:
    """Load a `TextToImage`; size and decoder are as on the command line.

    Raises:
        OptionError, UnsupportedModelError, MissingBackendError: see `TextToImage.from_pretrained`.
    """
    parts = {"size": parse_size(size), "decoder": decoder}
    return open_with_parts("TextToImage", model, load, **parts)


def open_clip_pipeline(model: str, load: LoadOptions) -> Any:
    """Load a `TextToVideo`; see `open_with_parts`."""
    return open_with_parts("TextToVideo", model, load)


def open_with_parts(pipeline: str, model: str, load: LoadOptions, **parts: Any) -> Any:
    """Load any pipeline.

    Args:
        pipeline: name of its class.
        model: name, folder or hub id.
        load: how it is opened.
        **parts: further arguments of its `from_pretrained`, such as its codec.

    Raises:
        OptionError, UnsupportedModelError, MissingBackendError: see its `from_pretrained`.
    """
    from transformers.utils import logging

    import mmaccel

    logging.disable_progress_bar()
    return getattr(mmaccel, pipeline).from_pretrained(model, **parts, **load_keywords(load))
