"""Folders of images, clips or sound: which files count, what they were made from, and pixels.

An image of `mmaccel generate` carries its prompt and seed (text chunk `mmaccel`, JSON), a clip of
`mmaccel animate` has them in a JSON file of the same name next to it; where any file does, only
those count: the others are sheets. `prompts.jsonl` may name other files, a line each, with or
without a seed and more: `{"file": "a.png", "prompt": "…", "seed": 0}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmaccel.errors import OptionError, ShapeError
from mmaccel.limits import parse_json, read_lines, read_whole
from mmaccel.outputs.video_files import read_frames
from mmaccel.pipelines.hosts.loading.pictures import open_picture

LIST = "prompts.jsonl"
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
CLIPS = (".mp4", ".gif", ".webm", ".mov")
MOVING = (*CLIPS, ".webp")
SOUNDS = (".wav",)
_MADE_BY = {IMAGES: "mmaccel generate", SOUNDS: "mmaccel speak"}  # others: mmaccel animate
_MOST_FRAMES = 256  # of a clip


@dataclass(frozen=True)
class Item:
    """A file that counts, and what it carries; prompt and seed are None where nothing says them."""

    file: Path
    prompt: str | None = None
    seed: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def list_items(folder: Path, kinds: Sequence[str] = IMAGES) -> list[Item]:
    """The files of a folder that count, by name, with the facts of its `prompts.jsonl`."""
    if not folder.is_dir():
        raise OptionError(f"folder: expected a folder, received {str(folder)!r}; check the path")
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in kinds and f.is_file())
    if not files:
        raise OptionError(
            f"folder: expected files ending in {', '.join(kinds)}, received none in "
            f"{str(folder)!r}; make some with {_MADE_BY.get(tuple(kinds), 'mmaccel animate')} --out"
        )
    listed = read_list(folder / LIST)
    items = []
    for file in files:
        facts = listed.get(file.name) or read_facts(file)
        prompt, seed = facts.get("prompt"), facts.get("seed")
        is_number = isinstance(seed, int) and not isinstance(seed, bool)
        known = (prompt if isinstance(prompt, str) else None, seed if is_number else None)
        items.append(Item(file, *known, facts))
    named = [item for item in items if item.prompt is not None]
    return named or items


def read_facts(file: Path) -> dict[str, Any]:
    """What `mmaccel generate` wrote into a PNG, or a JSON file next to any other; maybe empty."""
    text: str | bytes | None = None
    if file.suffix.lower() == ".png":
        with open_image(file) as image:
            text = getattr(image, "text", {}).get("mmaccel")
    elif file.with_suffix(".json").is_file():
        text = read_whole(file.with_suffix(".json"), "facts")
    return _parse(text)


def _parse(text: str | bytes | None) -> dict[str, Any]:
    try:
        facts = parse_json(text) if text else {}
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def open_image(file: Path) -> Any:
    with open_picture(file) as image:
        image.load()
        return image


def read_pixels(items: Sequence[Item], batch_size: int = 64) -> Iterator[Tensor]:
    """Pixels of images, `[B, 3, H, W]` uint8, B <= `batch_size`; ShapeError for unlike sizes."""
    first: tuple[Path, tuple[int, int]] | None = None
    for k in range(0, len(items), batch_size):
        part, rows = items[k : k + batch_size], []
        for item in part:  # before pixels are decoded
            with open_picture(item.file) as image:
                size, mode = image.size, image.mode
            first = first or (item.file, size)
            if size != first[1]:
                raise ShapeError(
                    f"images: expected one size, received {first[1][0]}x{first[1][1]} "
                    f"({first[0].name}) and {size[0]}x{size[1]} ({item.file.name}); "
                    "put each size into a folder of its own"
                )
            if mode.startswith(("I", "F")):  # which Pillow would cut at 255 and not scale
                raise OptionError(
                    f"image: expected 8 bits a channel, received mode {mode} in "
                    f"{str(item.file)!r}; convert it first, to the range you mean"
                )
        for item in part:
            with open_image(item.file) as image:
                pixels = np.asarray(image.convert("RGB"))
            rows.append(torch.from_numpy(pixels.copy()).permute(2, 0, 1))
        yield torch.stack(rows)


def read_clips(items: Sequence[Item], batch_size: int = 16) -> Iterator[Tensor]:
    """Frames of clips in order, `[B, F, 3, H, W]` uint8, B at most `batch_size`.

    Formats may keep equal frames as one; it counts as often as the facts' `frames` say.
    """
    first: tuple[Path, list[int]] | None = None
    for k in range(0, len(items), batch_size):
        rows = []
        for item in items[k : k + batch_size]:
            frames = read_frames(item.file, _MOST_FRAMES + 1, "clip")
            wanted = item.facts.get("frames")
            if len(frames) == 1 and isinstance(wanted, int) and 1 < wanted <= _MOST_FRAMES:
                frames = frames * wanted
            if len(frames) > _MOST_FRAMES:
                raise OptionError(
                    f"clip: expected at most {_MOST_FRAMES} frames, received more in "
                    f"{str(item.file)!r}; cut it"
                )
            clip = np.stack([np.asarray(frame.convert("RGB")) for frame in frames])
            shape = [*clip.shape[:3]]
            first = first or (item.file, shape)
            if shape != first[1]:
                raise ShapeError(
                    f"clips: expected one [frames, height, width], received {first[1]} "
                    f"({first[0].name}) and {shape} ({item.file.name}); put each kind into a "
                    "folder of its own"
                )
            rows.append(torch.from_numpy(clip).permute(0, 3, 1, 2))
        yield torch.stack(rows)


def read_list(file: Path) -> dict[str, dict[str, Any]]:
    """`prompts.jsonl` by file name; each line has a `prompt` and the `file` of its folder, once."""
    listed: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(read_lines(file, "text") if file.is_file() else (), 1):
        facts = _parse(line)
        name = facts.get("file")
        if not line.strip():
            continue
        if (
            not isinstance(name, str)
            or not isinstance(facts.get("prompt"), str)
            or Path(name).name != name
            or not (file.parent / name).is_file()
            or name in listed
        ):
            raise OptionError(
                f'{file.name}: expected {{"file": "…", "prompt": "…", "seed": 0}} on each line, '
                f"each file of the folder once, received {line[:60]!r} on line {number}; correct it"
                ", or take it out (seed may be left out)"
            )
        listed[name] = facts
    return listed
