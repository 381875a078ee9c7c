"""Writes the folders of `mmaccel.evaluation.suites`: links where the bytes stay the same, new
pictures where a suite wants another form. Nothing is moved or changed in the place it came from.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmaccel.errors import OptionError, ShapeError
from mmaccel.evaluation.picture_folder import Item, open_picture
from mmaccel.evaluation.suites import Prompt

_JPEG = 95  # quality of the pictures of hpsv2, whose code asks for .jpg

Write = Callable[[Path, Callable[[Path], object]], object]
"""(final name, writes the path it is given): writes whole or not at all."""


def plan_files(
    suite: str, prompts: Sequence[Prompt], matched: Sequence[Sequence[Item]]
) -> dict[str, Callable[[Path], object]]:
    """Every file of a suite's folder by its relative name, with what writes it.

    Args:
        suite: one of `mmaccel.evaluation.suites.SUITES`.
        prompts: P of them.
        matched: the items of each.

    Raises:
        OptionError: a prompt that cannot be a file's name, or a number of pictures that makes no
            grid.
    """
    plan: dict[str, Callable[[Path], object]] = {}
    for prompt, items in zip(prompts, matched, strict=True):
        _CHECKS.get(suite, _check_nothing)(prompt, items)
        for name, write in _LAYOUTS[suite](prompt, items):
            plan[name] = write
    if suite == "partiprompts":
        lines = [{"file": f"{p.name}.png", "prompt": p.text, **p.facts} for p in prompts]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        plan["prompts.jsonl"] = _text(text)
    return plan


def write_files(out: Path, plan: dict[str, Callable[[Path], object]], write: Write) -> None:
    """Write a plan's files into a folder, which has its name only once they are all there: a suite
    would take half of them for the whole.

    Args:
        out: the folder; there is none yet, or an empty one.
        plan: of `plan_files`.
        write: see `Write`.
    """
    partial = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for name, make in plan.items():
            file = partial / name
            file.parent.mkdir(parents=True, exist_ok=True)
            write(file, make)
        if out.is_dir():
            out.rmdir()
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def link(source: Path) -> Callable[[Path], object]:
    """Writes a hard link to a file, or a copy where the two lie on different disks."""

    def make(path: Path) -> None:
        path.unlink(missing_ok=True)
        try:
            os.link(source.resolve(), path)  # of a link's target: a relative link leads nowhere
        except OSError:
            shutil.copyfile(source, path)

    return make


def make_grid(items: Sequence[Item]) -> Callable[[Path], object]:
    """Writes 1 or 4 pictures of one size as a grid, in rows.

    Raises:
        ShapeError: when it is written, pictures of unlike sizes.
    """

    def make(path: Path) -> None:
        from PIL import Image

        pictures = [open_picture(item.file).convert("RGB") for item in items]
        sizes = {picture.size for picture in pictures}
        if len(sizes) > 1:
            raise ShapeError(
                f"pictures: expected one size for a grid, received {sorted(sizes)} "
                f"({items[0].prompt}); make them again"
            )
        (width, height), side = pictures[0].size, round(len(items) ** 0.5)
        grid = Image.new("RGB", (side * width, side * height))
        for k, picture in enumerate(pictures):
            grid.paste(picture, (k % side * width, k // side * height))
        grid.save(path, format="PNG")

    return make


def _geneval(prompt: Prompt, items: Sequence[Item]) -> list[tuple[str, Any]]:
    files = [
        (f"{prompt.name}/samples/{k:04d}.png", _png(item.file)) for k, item in enumerate(items)
    ]
    return [(f"{prompt.name}/metadata.jsonl", _text(json.dumps(prompt.facts) + "\n")), *files]


def _dpg(prompt: Prompt, items: Sequence[Item]) -> list[tuple[str, Any]]:
    return [(f"{prompt.name}.png", make_grid(items))]


def _hpsv2(prompt: Prompt, items: Sequence[Item]) -> list[tuple[str, Any]]:
    return [(f"{prompt.name}.jpg", _jpeg(items[0].file))]


def _vbench(prompt: Prompt, items: Sequence[Item]) -> list[tuple[str, Any]]:
    return [
        (f"{prompt.name}-{k}{item.file.suffix.lower()}", link(item.file))
        for k, item in enumerate(items)
    ]


def _partiprompts(prompt: Prompt, items: Sequence[Item]) -> list[tuple[str, Any]]:
    return [(f"{prompt.name}.png", _png(items[0].file))]


def _png(source: Path) -> Callable[[Path], object]:
    if source.suffix.lower() == ".png":
        open_picture(source).close()  # a broken one is refused before anything is written
        return link(source)
    return lambda path: open_picture(source).convert("RGB").save(path, format="PNG")


def _jpeg(source: Path) -> Callable[[Path], object]:
    if source.suffix.lower() in (".jpg", ".jpeg"):
        return link(source)
    options: dict[str, Any] = {"format": "JPEG", "quality": _JPEG, "subsampling": 0}
    return lambda path: open_picture(source).convert("RGB").save(path, **options)


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text, encoding="utf-8")


def _check_name(prompt: Prompt, items: Sequence[Item]) -> None:
    name = f"{prompt.text}-0.mp4"
    if "/" in name or "\0" in name or len(name.encode()) > 255:
        raise OptionError(
            f"prompt: expected one that can be a file's name, as the suite asks for, received "
            f"{prompt.text[:80]!r}; leave it out of the prompts"
        )
    if len({item.file.suffix.lower() for item in items}) > 1:
        raise OptionError(
            f"clips: expected one kind of file, received several for {prompt.text[:80]!r}; the "
            "suite looks for the first one's suffix alone"
        )


def _check_grid(prompt: Prompt, items: Sequence[Item]) -> None:
    if len(items) not in (1, 4):
        raise OptionError(
            f"per-prompt: expected 1 or 4, which make a square, received {len(items)}; the suite "
            "reads four at most"
        )


def _check_nothing(prompt: Prompt, items: Sequence[Item]) -> None:
    pass


_CHECKS = {"dpg": _check_grid, "vbench": _check_name}
_LAYOUTS = {
    "geneval": _geneval,
    "dpg": _dpg,
    "hpsv2": _hpsv2,
    "vbench": _vbench,
    "partiprompts": _partiprompts,
}
