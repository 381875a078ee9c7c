"""Pictures on disk: written whole or not at all, and carrying what they were made from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.commands.machine import versions

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmaccel.results import Stats


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Write under a temporary name in the same folder, then rename.

    Args:
        file: the final name.
        write: writes the path it is given. If it fails or is stopped, nothing is left behind.
    """
    partial = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        write(partial)
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def picture_name(seed: int, prompt: str, policy: str) -> str:
    """A file name that sorts by seed and can be read: `0003-a-red-circle-above-a-jacobi.png`."""
    words = ["".join(c for c in word if c.isalnum()) for word in prompt.lower().split()[:5]]
    return "-".join([f"{seed:04d}", *filter(None, words), policy]) + ".png"


def describe(prompt: str, seed: int, settings: dict[str, Any], stats: Stats) -> dict[str, Any]:
    """What a picture was made from, ready for JSON.

    Args:
        prompt: its caption.
        seed: its own seed.
        settings: model, policy and filters.
        stats: of the batch it was made in.
    """
    return {
        "prompt": prompt,
        "seed": seed,
        **settings,
        "versions": versions(),
        "stats": stats.to_dict(),
    }


def human_line(facts: dict[str, Any]) -> str:
    """`facts` from `describe` as text: the caption, then one line of settings."""
    stats = facts["stats"]
    settings = ("dtype", "guidance_scale", "temperature", "top_k", "top_p", "min_p")
    parts = [f"Seed: {facts['seed']}", f"Model: {facts['model']}", f"Policy: {stats['policy']}"]
    parts += [f"{name}: {facts[name]}" for name in settings if facts.get(name) is not None]
    parts += [
        f"Exactness: {stats['exactness']}",
        f"{stats['tokens']} tokens in {stats['passes']} forward passes",
        f"mmaccel {facts['versions']['mmaccel']}",
    ]
    return f"{facts['prompt']}\n{', '.join(parts)}"


def write_png(file: Path, image: Image, facts: dict[str, Any]) -> None:
    """Write a PNG whose text chunks are `parameters` (for people) and `mmaccel` (JSON)."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("parameters", human_line(facts))
    info.add_text("mmaccel", json.dumps(facts))
    write_whole(file, lambda path: image.save(path, format="PNG", pnginfo=info))
