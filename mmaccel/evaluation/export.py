"""Folders in the layouts that prompt suites read, made of images that `mmaccel generate` wrote.

Files are links where the bytes stay the same, and new images where a suite wants another form.
Nothing is moved or changed in the folder it came from.

The suites run in environments of their own (their packages pin versions that a current transformers
does not go with); what they read, as of the repositories named:

* geneval (djghosh13/geneval, README and evaluation/evaluate_images.py): `00000/metadata.jsonl`, the
  prompt's line of `evaluation_metadata.jsonl`, and `00000/samples/0000.png`, 4 a prompt.
* dpg (TencentQQGYLab/ELLA, dpg_bench/compute_dpg_bench.py): `ITEM.png`, 2x2 images of one prompt
  in rows (1x1 with --per-prompt 1), ITEM the prompt's id, the file of prompts being a folder of
  `ITEM.txt`.
* hpsv2 (tgxs002/HPSv2, README and hpsv2/evaluation.py): `STYLE/00000.jpg` by the prompt's index in
  `STYLE.json`, a list; one a prompt.
* vbench (Vchitect/VBench, prompts/README.md): `PROMPT-0.mp4` … `PROMPT-4.mp4`.
* partiprompts (google-research/parti, PartiPrompts.tsv, which prescribes no folder): `00000.png` by
  the row, and `prompts.jsonl` with each row's Prompt, Category and Challenge.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mmaccel.errors import OptionError, ShapeError
from mmaccel.evaluation.quality.image_folder import CLIPS, IMAGES, Item, open_image
from mmaccel.limits import parse_json, read_lines, read_whole

_SHOWN = 20  # prompts named in an error
_JPEG: dict[str, Any] = {"format": "JPEG", "quality": 95, "subsampling": 0}  # hpsv2 asks for .jpg
_PNG = {"format": "PNG"}

Make = Callable[[Path], object]
"""Writes a file under the name that it is given."""


@dataclass(frozen=True)
class Prompt:
    """A prompt of a suite: its text, what files are named by, and what goes into files."""

    text: str
    name: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """What a suite reads.

    Attributes:
        per_prompt: files of a prompt that it asks for.
        read: its prompts from a file or folder.
        file: the name of a prompt's file number `k`, of `name`, and with the `suffix` of the image.
        save: how Pillow writes a file; None links it whatever it is.
        kinds: suffixes of the files it takes.
        prompts: what holds its prompts, in words.
        allowed: numbers of files of a prompt that it reads; empty: any.
        is_grid: whether all images of a prompt are one file.
        lines: the name of a file with a line of facts for a prompt, of `name`.
    """

    per_prompt: int
    read: Callable[[Path], Iterator[Prompt]]
    file: str
    save: dict[str, Any] | None
    kinds: tuple[str, ...] = IMAGES
    prompts: str = "a file"
    allowed: tuple[int, ...] = ()
    is_grid: bool = False
    lines: str = ""


def read_prompts(suite: str, source: Path) -> list[Prompt]:
    """The prompts of a suite, in its order.

    Raises:
        OptionError: no such file or folder, or nothing of that form in it.
    """
    layout = SUITES[suite]
    try:
        found = list(layout.read(source))
        if not found or not all(isinstance(p.text, str) and p.text.strip() for p in found):
            raise ValueError("no prompts, or one without a text")
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        raise OptionError(
            f"prompts: expected {layout.prompts} as {suite} has, received {str(source)!r} "
            f"({reason}); take what is in the suite's repository as it is"
        ) from error
    return found


def match_items(
    prompts: Sequence[Prompt], items: Sequence[Item], per_prompt: int, *, partial: bool = False
) -> list[tuple[Prompt, list[Item]]]:
    """Prompts with their files, by seed and then by name.

    Args:
        prompts: one that occurs twice takes the next files.
        items: files with prompts.
        per_prompt: files each prompt is to have.
        partial: leave out prompts without enough files.

    Raises:
        OptionError: prompts without enough files, with a list of them, or none with them.
    """
    by_prompt: dict[str, list[Item]] = {}
    for item in sorted(items, key=lambda i: (i.seed is None, i.seed or 0, i.file.name)):
        by_prompt.setdefault(" ".join((item.prompt or "").split()), []).append(item)
    matched, missing = [], []
    for prompt in prompts:
        left = by_prompt.get(" ".join(prompt.text.split()), [])
        if len(left) < per_prompt:
            missing.append(f"{prompt.name} ({len(left)} of {per_prompt}): {prompt.text}")
        else:
            matched.append((prompt, left[:per_prompt]))
            del left[:per_prompt]
    if missing and not (partial and matched):
        raise OptionError(
            f"images: expected {per_prompt} of each prompt, received fewer of {len(missing)} of "
            f"{len(prompts)} prompts: {'; '.join(missing[:_SHOWN])}. Make them with mmaccel "
            "generate; --partial leaves such prompts out"
        )
    return matched


def plan_files(suite: str, matched: Sequence[tuple[Prompt, Sequence[Item]]]) -> dict[str, Make]:
    """Every file of a suite's folder by its relative name, with what writes it.

    Raises:
        OptionError: a prompt that cannot be a file's name.
    """
    layout = SUITES[suite]
    plan: dict[str, Make] = {}
    lines: dict[str, list[dict[str, Any]]] = {}
    for prompt, items in matched:
        parts = [items] if layout.is_grid else [[item] for item in items]
        for k, part in enumerate(parts):
            suffix = part[0].file.suffix.lower()
            name = layout.file.format(name=prompt.name, k=k, suffix=suffix)
            if prompt.name == prompt.text and ("/" in name or "\0" in name or len(name) > 200):
                raise OptionError(
                    "prompt: expected one that can be a file's name, as the suite asks for, "
                    f"received {prompt.text[:80]!r}; leave it out of the prompts"
                )
            plan[name] = partial(_make, part, layout.save)
        if layout.lines:
            lines.setdefault(layout.lines.format(name=prompt.name), []).append(prompt.facts)
    return plan | {name: partial(_write_lines, rows) for name, rows in lines.items()}


def write_files(out: Path, plan: dict[str, Make], write: Callable[[Path, Make], object]) -> None:
    """Write a plan's files into a folder, which has its name only once they are all there: a suite
    would take half of them for the whole.

    Args:
        out: the folder; there is none yet, or an empty one.
        plan: of `plan_files`.
        write: writes a file whole or not at all.
    """
    begun = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(begun, ignore_errors=True)
    try:
        for name, make in plan.items():
            (begun / name).parent.mkdir(parents=True, exist_ok=True)
            write(begun / name, make)
        if out.is_dir():
            out.rmdir()
        os.replace(begun, out)
    finally:
        shutil.rmtree(begun, ignore_errors=True)


def _make(items: Sequence[Item], save: dict[str, Any] | None, path: Path) -> None:
    """Write images as one, a grid in rows where there are several; a hard link, or a copy from
    another disk, where the file is of that form already.

    Raises:
        ShapeError: images of unlike sizes.
    """
    from PIL import Image

    source = items[0].file.resolve()  # of a link's target: a relative link leads nowhere
    if save is None or (len(items) == 1 and _is_of(source, save)):
        path.unlink(missing_ok=True)
        try:
            os.link(source, path)
        except OSError:
            shutil.copyfile(source, path)
        return
    images = [open_image(item.file).convert("RGB") for item in items]
    (width, height), side = images[0].size, round(len(items) ** 0.5)
    if any(image.size != (width, height) for image in images):
        raise ShapeError(
            f"images: expected one size for a grid, received others ({items[0].prompt}); make them "
            "again"
        )
    grid = Image.new("RGB", (side * width, side * height))
    for k, image in enumerate(images):
        grid.paste(image, (k % side * width, k // side * height))
    grid.save(path, **save)


def _is_of(file: Path, save: dict[str, Any]) -> bool:
    """Whether a file is of a format; a broken one raises OptionError."""
    image = open_image(file)
    return bool(image.format == save["format"])


def _write_lines(rows: Sequence[dict[str, Any]], path: Path) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def _read_geneval(file: Path) -> Iterator[Prompt]:
    for k, line in enumerate(_lines(file)):
        row = parse_json(line)
        yield Prompt(row["prompt"], f"{k:05d}", row)


def _read_dpg(folder: Path) -> Iterator[Prompt]:
    for file in sorted(folder.glob("*.txt")):
        yield Prompt(str(read_whole(file, "prompts"), "utf-8").strip(), file.stem)


def _read_hpsv2(source: Path) -> Iterator[Prompt]:
    for file in sorted(source.glob("*.json")) if source.is_dir() else [source]:
        for k, text in enumerate(parse_json(read_whole(file, "prompts"))):
            yield Prompt(text, f"{file.stem}/{k:05d}")


def _read_vbench(file: Path) -> Iterator[Prompt]:
    return (Prompt(text, text) for text in dict.fromkeys(line.strip() for line in _lines(file)))


def _read_partiprompts(file: Path) -> Iterator[Prompt]:
    rows = csv.DictReader(_lines(file), delimiter="\t", quoting=csv.QUOTE_NONE)
    for k, row in enumerate(rows):
        facts = {"file": f"{k:05d}.png", "prompt": row["Prompt"], **row}
        yield Prompt(row["Prompt"], f"{k:05d}", facts)


def _lines(file: Path) -> list[str]:
    return [line for line in read_lines(file, "prompts") if line.strip()]


SUITES = {
    "geneval": Suite(
        4, _read_geneval, "{name}/samples/{k:04d}.png", _PNG, lines="{name}/metadata.jsonl"
    ),
    "dpg": Suite(
        4, _read_dpg, "{name}.png", _PNG,
        prompts="a folder of *.txt", allowed=(1, 4), is_grid=True,
    ),
    "hpsv2": Suite(
        1, _read_hpsv2, "{name}.jpg", _JPEG,
        prompts="STYLE.json or a folder of them", allowed=(1,),
    ),
    "vbench": Suite(5, _read_vbench, "{name}-{k}{suffix}", None, CLIPS),
    "partiprompts": Suite(
        1, _read_partiprompts, "{name}.png", _PNG, allowed=(1,), lines="prompts.jsonl"
    ),
}  # fmt: skip
"""Suites by name."""
