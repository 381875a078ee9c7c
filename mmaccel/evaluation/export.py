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
from pathlib import Path
from typing import Any

from mmaccel.errors import OptionError, ShapeError
from mmaccel.evaluation.quality.image_folder import CLIPS, IMAGES, Item, open_image
from mmaccel.limits import parse_json, read_lines, read_whole

_SHOWN = 20  # prompts named in an error
_JPEG: dict[str, Any] = {"format": "JPEG", "quality": 95, "subsampling": 0}  # hpsv2 asks for .jpg

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
        make: what writes a file: of an image, or of all images of a prompt.
        kinds: suffixes of the files it takes.
        prompts: what holds its prompts, in words.
        allowed: numbers of files of a prompt that it reads; empty: any.
    """

    per_prompt: int
    read: Callable[[Path], Iterator[Prompt]]
    file: str
    make: Callable[[Sequence[Item]], Make]
    kinds: tuple[str, ...] = IMAGES
    prompts: str = "a file"
    allowed: tuple[int, ...] = ()


def read_prompts(suite: str, source: Path) -> list[Prompt]:
    """The prompts of a suite, in its order.

    Raises:
        OptionError: another suite, no such file or folder, or nothing of that form in it.
    """
    if suite not in SUITES:
        raise OptionError(
            f"suite: expected one of {', '.join(SUITES)}, received {suite!r}; choose one of these"
        )
    try:
        if source.is_dir() and "folder" not in SUITES[suite].prompts:
            raise IsADirectoryError(f"a folder, not {SUITES[suite].prompts}")
        found = list(SUITES[suite].read(source))
        wrong = [p.name for p in found if not isinstance(p.text, str) or not p.text.strip()]
        if wrong or not found:
            raise ValueError(f"no text for {wrong[0]!r}" if wrong else "no prompts")
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        raise OptionError(
            f"prompts: expected {SUITES[suite].prompts} as {suite} has, received {str(source)!r} "
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
        by_prompt.setdefault(_plain(item.prompt or ""), []).append(item)
    matched, missing = [], []
    for prompt in prompts:
        left = by_prompt.get(_plain(prompt.text), [])
        if len(left) < per_prompt:
            missing.append(f"{prompt.name} ({len(left)} of {per_prompt}): {prompt.text}")
        else:
            matched.append((prompt, left[:per_prompt]))
            del left[:per_prompt]
    if missing and not (partial and matched):
        shown = "; ".join(missing[:_SHOWN])
        rest = f"; and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise OptionError(
            f"images: expected {per_prompt} of each prompt, received fewer of {len(missing)} of "
            f"{len(prompts)} prompts: {shown}{rest}. Make them with mmaccel generate; --partial "
            "leaves such prompts out"
        )
    return matched


def _plain(text: str) -> str:
    return " ".join(text.split())


def plan_files(suite: str, matched: Sequence[tuple[Prompt, Sequence[Item]]]) -> dict[str, Make]:
    """Every file of a suite's folder by its relative name, with what writes it.

    Raises:
        OptionError: a prompt that cannot be a file's name.
    """
    layout = SUITES[suite]
    plan: dict[str, Make] = {}
    for prompt, items in matched:
        parts = [items] if layout.make is make_grid else [[item] for item in items]
        for k, part in enumerate(parts):
            suffix = part[0].file.suffix.lower()
            name = layout.file.format(name=prompt.name, k=k, suffix=suffix)
            if suite == "vbench" and ("/" in name or "\0" in name or len(name.encode()) > 255):
                raise OptionError(
                    "prompt: expected one that can be a file's name, as the suite asks for, "
                    f"received {prompt.text[:80]!r}; leave it out of the prompts"
                )
            plan[name] = layout.make(part)
        if suite == "geneval":
            plan[f"{prompt.name}/metadata.jsonl"] = _write_lines([prompt.facts])
    if suite == "partiprompts":
        plan["prompts.jsonl"] = _write_lines(
            [{"file": f"{p.name}.png", "prompt": p.text, **p.facts} for p, _ in matched]
        )
    return plan


def write_files(out: Path, plan: dict[str, Make], write: Callable[[Path, Make], object]) -> None:
    """Write a plan's files into a folder, which has its name only once they are all there: a suite
    would take half of them for the whole.

    Args:
        out: the folder; there is none yet, or an empty one.
        plan: of `plan_files`.
        write: writes a file whole or not at all.
    """
    partial = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for name, make in plan.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            write(partial / name, make)
        if out.is_dir():
            out.rmdir()
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def link(items: Sequence[Item]) -> Make:
    """Writes a hard link to a file, or a copy where the two lie on different disks."""
    source = items[0].file.resolve()  # of a link's target: a relative link leads nowhere

    def make(path: Path) -> None:
        path.unlink(missing_ok=True)
        try:
            os.link(source, path)
        except OSError:
            shutil.copyfile(source, path)

    return make


def make_grid(items: Sequence[Item]) -> Make:
    """Writes 1 or 4 images as a grid, in rows; raises ShapeError for images of unlike sizes."""

    def make(path: Path) -> None:
        from PIL import Image

        images = [open_image(item.file).convert("RGB") for item in items]
        sizes = {image.size for image in images}
        if len(sizes) > 1:
            raise ShapeError(
                f"images: expected one size for a grid, received {sorted(sizes)} "
                f"({items[0].prompt}); make them again"
            )
        (width, height), side = images[0].size, round(len(items) ** 0.5)
        grid = Image.new("RGB", (side * width, side * height))
        for k, image in enumerate(images):
            grid.paste(image, (k % side * width, k // side * height))
        grid.save(path, format="PNG")

    return make


def _png(items: Sequence[Item]) -> Make:
    source = items[0].file
    if source.suffix.lower() == ".png":
        open_image(source).close()  # a broken one is refused before anything is written
        return link(items)
    return lambda path: open_image(source).convert("RGB").save(path, format="PNG")


def _jpeg(items: Sequence[Item]) -> Make:
    source = items[0].file
    if source.suffix.lower() in (".jpg", ".jpeg"):
        return link(items)
    return lambda path: open_image(source).convert("RGB").save(path, **_JPEG)


def _write_lines(rows: Sequence[dict[str, Any]]) -> Make:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return lambda path: path.write_text(text, encoding="utf-8")


def _read_geneval(file: Path) -> Iterator[Prompt]:
    for k, line in enumerate(_lines(file)):
        row = parse_json(line)
        yield Prompt(row["prompt"], f"{k:05d}", row)


def _read_dpg(folder: Path) -> Iterator[Prompt]:
    for file in sorted(filter(Path.is_file, folder.glob("*.txt"))):
        yield Prompt(str(read_whole(file, "prompts"), "utf-8").strip(), file.stem)


def _read_hpsv2(source: Path) -> Iterator[Prompt]:
    files = sorted(filter(Path.is_file, source.glob("*.json"))) if source.is_dir() else [source]
    for file in files:
        texts = parse_json(read_whole(file, "prompts"))
        if not isinstance(texts, list):
            raise TypeError(f"no list in {file.name}")
        for k, text in enumerate(texts):
            yield Prompt(text, f"{file.stem}/{k:05d}")


def _read_vbench(file: Path) -> Iterator[Prompt]:
    return (Prompt(text, text) for text in dict.fromkeys(line.strip() for line in _lines(file)))


def _read_partiprompts(file: Path) -> Iterator[Prompt]:
    rows = csv.DictReader(_lines(file), delimiter="\t", quoting=csv.QUOTE_NONE)
    return (Prompt(row["Prompt"], f"{k:05d}", dict(row)) for k, row in enumerate(rows))


def _lines(file: Path) -> list[str]:
    return [line for line in read_lines(file, "prompts") if line.strip()]


SUITES = {
    "geneval": Suite(4, _read_geneval, "{name}/samples/{k:04d}.png", _png),
    "dpg": Suite(
        4, _read_dpg, "{name}.png", make_grid, prompts="a folder of *.txt", allowed=(1, 4)
    ),
    "hpsv2": Suite(
        1, _read_hpsv2, "{name}.jpg", _jpeg,
        prompts="STYLE.json or a folder of them", allowed=(1,),
    ),
    "vbench": Suite(5, _read_vbench, "{name}-{k}{suffix}", link, CLIPS),
    "partiprompts": Suite(1, _read_partiprompts, "{name}.png", _png, allowed=(1,)),
}  # fmt: skip
"""Suites by name."""
