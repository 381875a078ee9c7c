"""The cases of the fuzz: a seed spoils files and makes a command line, always the same ones.

`python -m tests.fuzz.cases SEED FOLDER` writes a case into a new folder and runs it.
"""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from mmaccel.catalog import METHODS, load
from tests.architecture.source import ROOT
from tests.fuzz import hostile
from tests.fuzz.world import build_world

COMMANDS: dict[str, tuple[str, ...]] = {  # valid and quick -> the files that they read
    "generate 'a red circle' --count 1 --model own": ("own/*",),
    "generate --prompts p.jsonl --model own": ("p.jsonl",),
    "generate --prompts p.csv --model own --dry-run": ("p.csv",),
    "generate --prompts p.txt --model own --dry-run --shard 1/2": ("p.txt",),
    "generate --prompts - --model own --dry-run": (),
    "generate --prompts p.jsonl --model own --out pictures --resume": ("pictures/*",),
    "answer start.png 'how many objects are there?' --max-tokens 2": ("start.png",),
    "speak 'a red fox' --model speech --codec speech-codec": ("speech/*", "speech-codec/*"),
    "animate start.png --model video --codec video-codec": (
        "start.png",
        "video/*",
        "video-codec/*",
    ),
    "gallery pictures --against plain --out page.html": ("pictures/*", "plain/*"),
    "bench 'a red circle' --count 1 --model own --policies jacobi --windows 8": ("own/*",),
    "comfy ui --force": ("ui/custom_nodes/*/.*",),
    "doctor --model own": ("own/*",),
    "models": (),
    "serve --port 0 --model own": ("own/*",),
    "evaluate pictures plain": ("plain/*",),
    "evaluate pictures plain --clip tests.fuzz.callables:embed --items i.jsonl": ("plain/*",),
    "evaluate pictures plain --against pictures": ("plain/*", "pictures/*"),
    "evaluate words ref.txt heard.txt --json r.json": ("ref.txt", "heard.txt"),
    "evaluate exactness own --prompts p.txt --count 2 --samples 0": ("p.txt",),
    "evaluate speed own --prompts p.txt --batch-sizes 1 --no-plots": ("p.txt",),
}
SLOTS = ("window", "tree", "kv_cache", "attention", "visual_tokens")  # an option each, with fields
_NAMES = "raises leaves nothing text narrow wide wrong_rows not_finite complex_numbers recursive"
_CALLABLES = [f"tests.fuzz.callables:{name}" for name in (*_NAMES.split(), "unprintable", "number")]
_CALLABLES += ["tests.fuzz.raising:f", "tests.fuzz.leaving:f", "os:sep", "not_here:f"]


@dataclass
class Case:
    """A command line to run in the folder of its files, and what standard input holds."""

    arguments: list[str]
    stdin: bytes = b""


def build_case(seed: int, folder: Path) -> Case:
    """Spoil files of a folder that holds a world, and return a command line."""
    rng = random.Random(seed)
    line = rng.choice(list(COMMANDS))
    arguments = shlex.split(line)
    kind = rng.choice(("options", "files", "files", "fields", "salad"))
    if kind == "salad":
        pool = [*hostile.TEXTS, "--set", "--json", "-h", "--no-such", "--version"]
        pool += [word for each in COMMANDS for word in shlex.split(each)]
        words = rng.choices(pool, k=rng.randrange(1, 9))
        return Case([*words, *({"comfy", "serve"} & {*words} and ["--no-such"])])
    if kind == "fields":
        arguments = _set_fields(rng)
    if kind == "options":
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            _spoil_option(arguments, rng)
    if kind == "files":
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            files = sorted(file for glob in COMMANDS[line] for file in folder.glob(glob))
            if files:
                hostile.spoil(rng.choice(files), rng)
    return Case(arguments, hostile.some_bytes(rng))


@cache
def parameters(words: tuple[str, ...]) -> list[Any]:
    """The parameters of a command, as click has them."""
    import typer

    from mmaccel.cli import app

    command: Any = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    return list(command.params)


def _spoil_option(arguments: list[str], rng: random.Random) -> None:
    """Give an option of a command a hostile value, or its first argument."""
    words = arguments[: 1 + (arguments[0] == "evaluate")]
    parameter = rng.choice(parameters(tuple(words)) or [None])
    if parameter is None:
        return
    pools = (hostile.INTEGERS, hostile.NUMBERS, hostile.TEXTS, hostile.PLAUSIBLE, _CALLABLES)
    value = rng.choice(rng.choice(pools))
    option = parameter.opts[0]
    if not option.startswith("-"):
        arguments[len(words) : len(words) + 1] = [value]
    else:
        arguments.append(option if parameter.is_flag else f"{option}={value}")


def _set_fields(rng: random.Random) -> list[str]:
    """A method of a slot with values that look right for its fields, or that nobody expects."""
    slot = rng.choice(SLOTS)
    name = rng.choice(list(METHODS[slot]))
    entry = METHODS[slot][name]
    own = [each.name for each in fields(load(entry.target)) if each.name not in entry.preset]
    own += [rng.choice(("", "self", "__class__", "w\u00efndow", "\x1b[2J", "x y"))]
    pool = hostile.PLAUSIBLE if rng.random() < 0.6 else hostile.LITERALS
    texts = [f"{rng.choice(own)}={rng.choice(pool)}" for _ in range(rng.choice((1, 1, 2)))]
    command = "answer start.png red --max-tokens 2"
    if slot != "visual_tokens":
        command = rng.choice(("generate red --count 1 --model own", command))
    if slot == "window":
        return [*command.split(), "--policy", name, *(f"--set={text}" for text in texts)]
    return [*command.split(), f"--{slot.replace('_', '-')}", ":".join((name, *texts))]


def main(seed: int, folder: Path) -> int:
    """Build a case, print its command line, and run it."""
    build_world(folder)
    case = build_case(seed, folder)
    program = [sys.executable, "-m", "mmaccel.cli", *case.arguments]
    print(f"cd {folder} && {shlex.join(program)}".encode("ascii", "backslashreplace").decode())
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(program, cwd=folder, input=case.stdin, timeout=60, env=environment)
    print(json.dumps({"exit code": done.returncode}))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
