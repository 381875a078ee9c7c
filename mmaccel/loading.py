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


def pick_name(policy: str | None, model: Any = None) -> str:
    """The short name of a policy, by default an exact one; OptionError for one of another kind than
    the model's, "window" (also for None) or "canvas".
    """
    from mmaccel.catalog import default_policy, find_policy

    if policy is None:
        return default_policy(model)
    find_policy(policy, getattr(model, "kind", "window"))
    return policy


def parse_size(value: Any, name: str = "--size") -> tuple[int, int] | None:
    """A size as `--size` or a row has it: 768, "1024x768" or [1024, 768], width first; None."""
    if value is None:
        return None
    text = "x".join(map(str, value)) if isinstance(value, list) else str(value)
    sides = _SIZE.fullmatch(text)
    width, height = (int(sides[1]), int(sides[2] or sides[1])) if sides else (0, 0)
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE):
        raise OptionError(
            f"{name}: expected pixels such as 768 or 1024x768, up to {MAX_SIDE}, received "
            f"{show(value)}; width comes first"
        )
    return width, height


def place(load: LoadOptions) -> LoadOptions:
    """Options whose device and dtype are names, "auto" replaced by what it means here."""
    from mmaccel.pipelines.hosts.loading.placement import choose_placement, name_dtype

    device, dtype = choose_placement(load.device, load.dtype)
    return replace(load, device=str(device), dtype=name_dtype(dtype))


def load_keywords(load: LoadOptions) -> dict[str, Any]:
    return {each.name: getattr(load, each.name) for each in fields(load)}


def open_pipeline(
    model: str, load: LoadOptions, *, size: str | None = None, decoder: Path | None = None
) -> Any:
    parts = {"size": parse_size(size), "decoder": decoder}
    return open_with_parts("TextToImage", model, load, **parts)


def open_with_parts(pipeline: str, model: str, load: LoadOptions, **parts: Any) -> Any:
    """Load any pipeline by the name of its class; parts are its own arguments, such as a codec."""
    from transformers.utils import logging

    import mmaccel

    logging.disable_progress_bar()
    return getattr(mmaccel, pipeline).from_pretrained(model, **parts, **load_keywords(load))
