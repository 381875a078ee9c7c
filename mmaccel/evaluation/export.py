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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmaccel.errors import OptionError, ShapeError
from mmaccel.evaluation.quality.image_folder import CLIPS, IMAGES, Item, open_image
from mmaccel.limits import parse_json, read_lines, read_whole

_SHOWN = 20  # prompts named in an error
_JPEG = 95  # quality of the images of hpsv2, whose code asks for .jpg

Write = Callable[[Path, Callable[[Path], object]], object]
"""(final name, writes the path it is given): writes whole or not at all."""


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
        per_prompt: images or clips of a prompt that it asks for.
        read: its prompts from a file or folder.
        plan: names and writers of a prompt's files.
        check: refuses a prompt or files that do not fit the layout.
        kinds: suffixes of the files it takes.
        prompts: what holds its prompts, in words.
    """

    per_prompt: int
    read: Callable[[Path], list[Prompt]]
    plan: Callable[[Prompt, Sequence[Item]], list[tuple[str, Any]]]
    check: Callable[[Prompt, Sequence[Item]], None] = lambda prompt, items: None
    kinds: tuple[str, ...] = IMAGES
    prompts: str = "a file"


def read_prompts(suite: str, source: Path) -> list[Prompt]:
    """The prompts of a suite, in its order.

    Args:
        suite: one of `SUITES`.
        source: geneval: `evaluation_metadata.jsonl`; dpg: the folder of `*.txt`; hpsv2: a folder of
            `STYLE.json` or one of them; vbench: a text file, a prompt a line; partiprompts:
            `PartiPrompts.tsv`.

    Raises:
        OptionError: another suite, no such file or folder, or nothing of that form in it.
    """
    if suite not in SUITES:
        raise OptionError(
            f"suite: expected one of {', '.join(SUITES)}, received {suite!r}; choose one of these"
        )
    is_right = source.is_dir() if suite == "dpg" else source.is_file()
    if not (is_right or (suite == "hpsv2" and source.is_dir())):
        raise OptionError(
            f"prompts: expected {SUITES[suite].prompts} for {suite}, received {str(source)!r}; it "
            "is in the suite's repository"
        )
    try:
        found = SUITES[suite].read(source)
    except OptionError:
        raise
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        raise OptionError(
            f"prompts: expected what {suite} has, received {str(source)!r} ({reason}); take the "
            "file of the suite's repository as it is"
        ) from error
    if not found:
        raise OptionError(f"prompts: expected at least one, received none in {str(source)!r}")
    wrong = [p for p in found if not isinstance(p.text, str) or not p.text.strip()]
    if wrong:
        raise OptionError(
            f"prompts: expected a text each, received {wrong[0].text!r} for {wrong[0].name!r} in "
            f"{str(source)!r}; take the file of the suite's repository as it is"
        )
    return found


def match_items(
    prompts: Sequence[Prompt], items: Sequence[Item], per_prompt: int
) -> list[list[Item]]:
    """The files of each prompt, by seed and then by name.

    Args:
        prompts: P of them; one that occurs twice takes the next files.
        items: files with prompts.
        per_prompt: files each prompt is to have.

    Raises:
        OptionError: prompts without enough files; with a list of them.
    """
    dealt = _deal(prompts, items, per_prompt)
    missing = [
        f"{prompt.name} ({len(own)} of {per_prompt}): {prompt.text}"
        for prompt, own in zip(prompts, dealt, strict=True)
        if len(own) < per_prompt
    ]
    if missing or not prompts:
        shown = "; ".join(missing[:_SHOWN])
        rest = f"; and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise OptionError(
            f"images: expected {per_prompt} of each prompt, received fewer of {len(missing)} of "
            f"{len(prompts)} prompts: {shown}{rest}. Make them with mmaccel generate; --partial "
            "leaves such prompts out"
        )
    return dealt


def keep_complete(
    prompts: Sequence[Prompt], items: Sequence[Item], per_prompt: int
) -> list[Prompt]:
    """The prompts that have enough files (arguments as `match_items`)."""
    dealt = _deal(prompts, items, per_prompt)
    return [p for p, own in zip(prompts, dealt, strict=True) if len(own) == per_prompt]


def _deal(prompts: Sequence[Prompt], items: Sequence[Item], per_prompt: int) -> list[list[Item]]:
    by_prompt: dict[str, list[Item]] = {}
    for item in sorted(items, key=lambda i: (i.seed is None, i.seed or 0, i.file.name)):
        by_prompt.setdefault(_plain(item.prompt or ""), []).append(item)
    dealt = []
    for prompt in prompts:
        own = by_prompt.get(_plain(prompt.text), [])
        dealt.append(own[:per_prompt])
        by_prompt[_plain(prompt.text)] = own[per_prompt:]
    return dealt


def _plain(text: str) -> str:
    return " ".join(text.split())


def _read_geneval(file: Path) -> list[Prompt]:
    rows = [parse_json(line) for line in _lines(file)]
    return [Prompt(row["prompt"], f"{k:05d}", row) for k, row in enumerate(rows)]


def _read_dpg(folder: Path) -> list[Prompt]:
    files = sorted(filter(Path.is_file, folder.glob("*.txt")))
    return [Prompt(str(read_whole(file, "prompts"), "utf-8").strip(), file.stem) for file in files]


def _read_hpsv2(source: Path) -> list[Prompt]:
    files = [source]
    if source.is_dir():
        files = sorted(filter(Path.is_file, source.glob("*.json")))
    found = []
    for file in files:
        texts = parse_json(read_whole(file, "prompts"))
        if not isinstance(texts, list):
            raise TypeError(f"no list in {file.name}")
        found += [Prompt(text, f"{file.stem}/{k:05d}") for k, text in enumerate(texts)]
    return found


def _read_vbench(file: Path) -> list[Prompt]:
    texts = list(dict.fromkeys(line.strip() for line in _lines(file)))
    return [Prompt(text, text) for text in texts]


def _read_partiprompts(file: Path) -> list[Prompt]:
    rows = csv.DictReader(_lines(file), delimiter="\t", quoting=csv.QUOTE_NONE)
    return [Prompt(row["Prompt"], f"{k:05d}", dict(row)) for k, row in enumerate(rows)]


def _lines(file: Path) -> list[str]:
    return [line for line in read_lines(file, "prompts") if line.strip()]


def plan_files(
    suite: str, prompts: Sequence[Prompt], matched: Sequence[Sequence[Item]]
) -> dict[str, Callable[[Path], object]]:
    """Every file of a suite's folder by its relative name, with what writes it.

    Args:
        suite: one of `SUITES`.
        prompts: P of them.
        matched: the items of each.

    Raises:
        OptionError: a prompt that cannot be a file's name, or a number of images that makes no
            grid.
    """
    plan: dict[str, Callable[[Path], object]] = {}
    for prompt, items in zip(prompts, matched, strict=True):
        SUITES[suite].check(prompt, items)
        plan |= SUITES[suite].plan(prompt, items)
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
        gone = [name for name in plan if not (partial / name).is_file()]
        if gone:
            raise OSError(
                f"--out: expected {len(plan)} written files for {str(out)!r}, received a folder "
                f"without {len(gone)} of them (the first is {gone[0]}), which something else "
                "removed; run it again"
            )
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
    """Writes 1 or 4 images of one size as a grid, in rows.

    Raises:
        ShapeError: when it is written, images of unlike sizes.
    """

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


def _plan_geneval(prompt: Prompt, items: Sequence[Item]) -> list[tuple[str, Any]]:
    files = [
        (f"{prompt.name}/samples/{k:04d}.png", _png(item.file)) for k, item in enumerate(items)
    ]
    return [(f"{prompt.name}/metadata.jsonl", _text(json.dumps(prompt.facts) + "\n")), *files]


def _plan_dpg(prompt: Prompt, items: Sequence[Item]) -> list[tuple[str, Any]]:
    return [(f"{prompt.name}.png", make_grid(items))]


def _plan_hpsv2(prompt: Prompt, items: Sequence[Item]) -> list[tuple[str, Any]]:
    return [(f"{prompt.name}.jpg", _jpeg(items[0].file))]


def _plan_vbench(prompt: Prompt, items: Sequence[Item]) -> list[tuple[str, Any]]:
    return [
        (f"{prompt.name}-{k}{item.file.suffix.lower()}", link(item.file))
        for k, item in enumerate(items)
    ]


def _plan_partiprompts(prompt: Prompt, items: Sequence[Item]) -> list[tuple[str, Any]]:
    return [(f"{prompt.name}.png", _png(items[0].file))]


def _png(source: Path) -> Callable[[Path], object]:
    if source.suffix.lower() == ".png":
        open_image(source).close()  # a broken one is refused before anything is written
        return link(source)
    return lambda path: open_image(source).convert("RGB").save(path, format="PNG")


def _jpeg(source: Path) -> Callable[[Path], object]:
    if source.suffix.lower() in (".jpg", ".jpeg"):
        return link(source)
    options: dict[str, Any] = {"format": "JPEG", "quality": _JPEG, "subsampling": 0}
    return lambda path: open_image(source).convert("RGB").save(path, **options)


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
            "suite reads files with the first one's suffix alone"
        )


def _check_grid(prompt: Prompt, items: Sequence[Item]) -> None:
    if len(items) not in (1, 4):
        raise OptionError(
            f"per-prompt: expected 1 or 4, which make a square, received {len(items)}; the suite "
            "reads four at most"
        )


SUITES = {
    "geneval": Suite(4, _read_geneval, _plan_geneval),
    "dpg": Suite(4, _read_dpg, _plan_dpg, _check_grid, prompts="a folder of *.txt"),
    "hpsv2": Suite(1, _read_hpsv2, _plan_hpsv2, prompts="STYLE.json or a folder of them"),
    "vbench": Suite(5, _read_vbench, _plan_vbench, _check_name, CLIPS),
    "partiprompts": Suite(1, _read_partiprompts, _plan_partiprompts),
}
"""Suites by name."""
