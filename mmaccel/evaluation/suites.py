"""Folders in the layouts that prompt suites read, made of pictures that `mmaccel generate` wrote.

The suites run in environments of their own (their packages pin versions that a current transformers
does not go with); what they read, as of the repositories named:

* geneval (djghosh13/geneval, README and evaluation/evaluate_images.py): `00000/metadata.jsonl`, the
  prompt's line of `evaluation_metadata.jsonl`, and `00000/samples/0000.png`, 4 a prompt.
* dpg (TencentQQGYLab/ELLA, dpg_bench/compute_dpg_bench.py): `ITEM.png`, 2x2 pictures of one prompt
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmaccel.errors import OptionError
from mmaccel.evaluation.picture_folder import CLIPS, PICTURES, Item
from mmaccel.evaluation.picture_list import read_lines

SUITES = {"geneval": 4, "dpg": 4, "hpsv2": 1, "vbench": 5, "partiprompts": 1}
"""Suites, and how many pictures or clips of a prompt each asks for."""
_SHOWN = 20  # prompts named in an error
KINDS = {name: CLIPS if name == "vbench" else PICTURES for name in SUITES}


@dataclass(frozen=True)
class Prompt:
    """A prompt of a suite: its text, what files are named by, and what goes into files."""

    text: str
    name: str
    facts: dict[str, Any] = field(default_factory=dict)


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
        wanted = {"dpg": "a folder of *.txt", "hpsv2": "STYLE.json or a folder of them"}
        raise OptionError(
            f"prompts: expected {wanted.get(suite, 'a file')} for {suite}, received "
            f"{str(source)!r}; it is in the suite's repository"
        )
    try:
        found = _READERS[suite](source)
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
        items: files with captions.
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
            f"pictures: expected {per_prompt} of each prompt, received fewer of {len(missing)} of "
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
    shelf: dict[str, list[Item]] = {}
    for item in sorted(items, key=lambda i: (i.seed is None, i.seed or 0, i.file.name)):
        shelf.setdefault(_plain(item.prompt or ""), []).append(item)
    dealt = []
    for prompt in prompts:
        own = shelf.get(_plain(prompt.text), [])
        dealt.append(own[:per_prompt])
        shelf[_plain(prompt.text)] = own[per_prompt:]
    return dealt


def _plain(text: str) -> str:
    return " ".join(text.split())


def _geneval(file: Path) -> list[Prompt]:
    rows = [json.loads(line) for line in _lines(file)]
    return [Prompt(row["prompt"], f"{k:05d}", row) for k, row in enumerate(rows)]


def _dpg(folder: Path) -> list[Prompt]:
    files = sorted(folder.glob("*.txt"))
    return [Prompt(file.read_text(encoding="utf-8").strip(), file.stem) for file in files]


def _hpsv2(source: Path) -> list[Prompt]:
    files = sorted(source.glob("*.json")) if source.is_dir() else [source]
    found = []
    for file in files:
        texts = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(texts, list):
            raise TypeError(f"no list in {file.name}")
        found += [Prompt(text, f"{file.stem}/{k:05d}") for k, text in enumerate(texts)]
    return found


def _vbench(file: Path) -> list[Prompt]:
    texts = list(dict.fromkeys(line.strip() for line in _lines(file)))
    return [Prompt(text, text) for text in texts]


def _partiprompts(file: Path) -> list[Prompt]:
    rows = csv.DictReader(_lines(file), delimiter="\t", quoting=csv.QUOTE_NONE)
    return [Prompt(row["Prompt"], f"{k:05d}", dict(row)) for k, row in enumerate(rows)]


def _lines(file: Path) -> list[str]:
    return [line for line in read_lines(file) if line.strip()]


_READERS = {
    "geneval": _geneval,
    "dpg": _dpg,
    "hpsv2": _hpsv2,
    "vbench": _vbench,
    "partiprompts": _partiprompts,
}
