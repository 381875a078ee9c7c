"""Folders in the layouts that prompt suites read, made of images that `mmaccel generate` wrote.

Files are links where the suite takes them as they are, and new images where it wants another form;
their source stays as it is. Suites run in environments of their own; what they read, as of the
repositories named:

* geneval (djghosh13/geneval, README and evaluation/evaluate_images.py): `00000/metadata.jsonl`, the
  prompt's line of `evaluation_metadata.jsonl`, and `00000/samples/0000.png`, 4 a prompt.
* dpg (TencentQQGYLab/ELLA, dpg_bench/compute_dpg_bench.py): `ITEM.png`, 2x2 images of one prompt
  in rows (1x1 with --per-prompt 1), ITEM the prompt's id, the file of prompts being a folder of
  `ITEM.txt`.
* hpsv2 (tgxs002/HPSv2, README and hpsv2/evaluation.py): `STYLE/00000.jpg` by the prompt's index in
  `STYLE.json`, a list; one a prompt.
* vbench (Vchitect/VBench, prompts/README.md): `PROMPT-0.mp4` … `PROMPT-4.mp4`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmaccel.errors import OptionError, ShapeError
from mmaccel.evaluation.quality.image_folder import CLIPS, IMAGES, Item, open_image
from mmaccel.limits import parse_json, read_lines, read_whole

_SHOWN = 20  # prompts named in an error
_JPEG: dict[str, Any] = {"quality": 95, "subsampling": 0}  # hpsv2 asks for .jpg
# A prompt of a suite: its text, what files are named by, and what goes into files.
Prompt = tuple[str, str, dict[str, Any]]


@dataclass(frozen=True)
class Suite:
    """What a suite reads."""

    per_prompt: int  # files of a prompt that it asks for
    read: Callable[[Path], Iterator[Prompt]]
    file: str  # name of a prompt's file number `k`, of `name`, and with the `suffix` of the image
    kinds: tuple[str, ...] = IMAGES
    prompts: str = "a file"  # what holds its prompts, in words
    allowed: tuple[int, ...] = ()  # numbers of files of a prompt that it reads; empty: any
    is_grid: bool = False  # whether all images of a prompt are one file
    lines: str = ""  # the name of a file with a line of facts for a prompt, of `name`


def read_prompts(suite: str, source: Path) -> list[Prompt]:
    """The prompts of a suite, in its order."""
    layout = SUITES[suite]
    if not source.exists():
        raise OptionError(
            f"prompts: expected {layout.prompts} as {suite} has, received {str(source)!r}, which "
            "is not there; check the path"
        )
    try:
        prompts = list(layout.read(source))
        if not prompts or not all(isinstance(text, str) and text.strip() for text, _, _ in prompts):
            raise ValueError("no prompts, or one without a text")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        raise OptionError(
            f"prompts: expected {layout.prompts} as {suite} has, received {str(source)!r} "
            f"({reason}); take what is in the suite's repository as it is"
        ) from error
    return prompts


def match_items(
    prompts: Sequence[Prompt], items: Sequence[Item], per_prompt: int, *, partial: bool = False
) -> list[tuple[Prompt, list[Item]]]:
    """Prompts with their files, by seed, then name; one that occurs twice takes the next files."""
    by_prompt: dict[str, list[Item]] = {}
    for item in sorted(items, key=lambda i: (i.seed is None, i.seed or 0, i.file.name)):
        by_prompt.setdefault(" ".join((item.prompt or "").split()), []).append(item)
    matched, missing = [], []
    for prompt in prompts:
        text, name, _ = prompt
        unused = by_prompt.get(" ".join(text.split()), [])
        if len(unused) < per_prompt:
            missing.append(f"{name} ({len(unused)} of {per_prompt}): {text}")
        else:
            matched.append((prompt, unused[:per_prompt]))
            del unused[:per_prompt]
    if missing and not (partial and matched):
        raise OptionError(
            f"images: expected {per_prompt} of each prompt, received fewer of {len(missing)} of "
            f"{len(prompts)} prompts: {'; '.join(missing[:_SHOWN])}. Make them with mmaccel "
            "generate; --partial leaves such prompts out"
        )
    return matched


def write_suite(out: Path, suite: str, matched: Sequence[tuple[Prompt, Sequence[Item]]]) -> int:
    """Write a suite's folder, named so once all files are there, or a suite would take half of them
    for the whole. Returns how many files it has.
    """
    layout, lines = SUITES[suite], dict[str, str]()
    begun = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(begun, ignore_errors=True)
    try:
        for (text, name, facts), items in matched:
            parts = [items] if layout.is_grid else [[item] for item in items]
            for k, part in enumerate(parts):
                suffix = part[0].file.suffix.lower()
                file = layout.file.format(name=name, k=k, suffix=suffix)
                if name == text and ("/" in file or "\0" in file or len(file) > 200):
                    raise OptionError(
                        "prompt: expected one that can be a file's name, as the suite asks for, "
                        f"received {text[:80]!r}; leave it out of the prompts"
                    )
                _write_images(part, begun / file)
            if layout.lines:
                lists = layout.lines.format(name=name)
                lines[lists] = f"{lines.get(lists, '')}{json.dumps(facts, ensure_ascii=False)}\n"
        for file, content in lines.items():
            (begun / file).write_text(content, encoding="utf-8")
        count = sum(path.is_file() for path in begun.rglob("*"))
        if out.is_dir():
            out.rmdir()
        os.replace(begun, out)
    finally:
        shutil.rmtree(begun, ignore_errors=True)
    return count


def _write_images(items: Sequence[Item], path: Path) -> None:
    """Write images as one, several as a grid; one of the same suffix is linked, or copied."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    source = items[0].file.resolve()  # of a link's target: a relative link leads nowhere
    if len(items) == 1 and source.suffix.lower() == path.suffix:
        try:
            os.link(source, path)
        except OSError:
            shutil.copyfile(source, path)
        return
    images = [open_image(item.file).convert("RGB") for item in items]
    (width, height), columns = images[0].size, round(len(items) ** 0.5)
    if any(image.size != (width, height) for image in images):
        raise ShapeError(
            f"images: expected one size for a grid, received others ({items[0].prompt}); make them "
            "again"
        )
    grid = Image.new("RGB", (columns * width, columns * height))
    for k, image in enumerate(images):
        grid.paste(image, (k % columns * width, k // columns * height))
    grid.save(path, **(_JPEG if path.suffix == ".jpg" else {}))


def _read_geneval(file: Path) -> Iterator[Prompt]:
    for k, line in enumerate(_lines(file)):
        row = parse_json(line)
        yield row["prompt"], f"{k:05d}", row


def _read_dpg(folder: Path) -> Iterator[Prompt]:
    for file in sorted(folder.glob("*.txt")):
        yield str(read_whole(file, "prompts"), "utf-8").strip(), file.stem, {}


def _read_hpsv2(source: Path) -> Iterator[Prompt]:
    for file in sorted(source.glob("*.json")) if source.is_dir() else [source]:
        for k, text in enumerate(parse_json(read_whole(file, "prompts"))):
            yield text, f"{file.stem}/{k:05d}", {}


def _read_vbench(file: Path) -> Iterator[Prompt]:
    return ((text, text, {}) for text in dict.fromkeys(line.strip() for line in _lines(file)))


def _lines(file: Path) -> list[str]:
    return [line for line in read_lines(file, "prompts") if line.strip()]


SUITES = {
    "geneval": Suite(4, _read_geneval, "{name}/samples/{k:04d}.png", lines="{name}/metadata.jsonl"),
    "dpg": Suite(
        4, _read_dpg, "{name}.png", prompts="a folder of *.txt", allowed=(1, 4), is_grid=True
    ),
    "hpsv2": Suite(
        1, _read_hpsv2, "{name}.jpg", prompts="STYLE.json or a folder of them", allowed=(1,)
    ),
    "vbench": Suite(5, _read_vbench, "{name}-{k}{suffix}", CLIPS),
}
"""Suites by name."""
