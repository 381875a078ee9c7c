"""Hundreds of generated bad inputs over all commands and kinds of files, each made by a seed.

No case may end in a traceback, hang, exit with an undocumented code, write beside its folder, run
code of an input, print what steers a terminal, or take gigabytes. Streams that never end:
tests/batch/test_prompts.py.
"""

from __future__ import annotations

import contextlib
import io
import random
import resource
import shlex
import shutil
import signal
import sys
import traceback
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import uvicorn

from mmaccel.catalog import METHODS, load
from mmaccel.cli import app, main
from mmaccel.samplers import run_lock
from tests.fuzz import hostile
from tests.fuzz.world import add_nodes, build_world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, makes FIFOs"),
]
CASES = 300
LIMIT = 20  # seconds of a case
CODES = {0, 1, 2, 3, 130}  # that are documented
MEMORY = 3 * 2**30
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
    "bench 'a red circle' --count 1 --model own --policies jacobi --windows 8": ("own/*",),
    "comfy ui --force": ("ui/custom_nodes/*/.*",),
    "doctor --model own": ("own/*",),
    "models": (),
    "serve --port 0 --model own": ("own/*",),
    "evaluate pictures plain --items i.jsonl": ("plain/*",),
    "evaluate pictures plain --against pictures": ("plain/*", "pictures/*"),
    "evaluate exactness own --prompts p.txt --count 2 --samples 0": ("p.txt",),
    "evaluate speed own --prompts p.txt --batch-sizes 1": ("p.txt",),
}
VALID = [line for line in COMMANDS if "--prompts -" not in line]
SLOTS = ("window", "tree", "kv_cache", "attention", "visual_tokens")  # an option each, with fields


def build_case(seed: int, folder: Path) -> tuple[list[str], bytes]:
    """Spoil files of a folder that holds a world, and return a command line and its stdin."""
    rng = random.Random(seed)
    line = rng.choice(list(COMMANDS))
    arguments, stdin = shlex.split(line), hostile.some_bytes(rng)
    kind = rng.choice(("options", "files", "files", "fields", "salad"))
    times = range(rng.choice((1, 1, 1, 2, 3)))
    if kind == "salad":
        pool = [*hostile.TEXTS, "--set", "--json", "-h", "--no-such", "--version"]
        pool += [word for each in COMMANDS for word in shlex.split(each)]
        words = rng.choices(pool, k=rng.randrange(1, 9))
        return [*words, *({"comfy", "serve"} & {*words} and ["--no-such"])], stdin
    if kind == "fields":
        return _set_fields(rng), stdin
    for _ in times:
        if kind == "options":
            _spoil_option(arguments, rng)
            continue
        files = sorted(file for glob in COMMANDS[line] for file in folder.glob(glob))
        if files:
            hostile.spoil(rng.choice(files), rng)
    return arguments, stdin


@cache
def parameters(words: tuple[str, ...]) -> list[Any]:
    """The parameters of a command, as click has them."""
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
    value = rng.choice(rng.choice((hostile.NUMBERS, hostile.TEXTS, hostile.PLAUSIBLE)))
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


def read_back(stream: io.TextIOWrapper) -> str:
    """What was written to a stream over bytes; sound is none of it."""
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode("utf-8", "replace")


def run_case(arguments: list[str], stdin: bytes, folder: Path) -> tuple[int | None, list[str]]:
    """Run a case in its folder; returns its exit code and what is wrong with it."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    wrong = list[str]()
    code: int | None = None
    beside = sorted(folder.parent.iterdir())

    def ring(*_: Any) -> None:
        raise SystemExit("it hangs")

    handler = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT)
    try:
        with (
            contextlib.chdir(folder),
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            code = main(arguments)
    except BaseException as error:
        wrong.append("".join(traceback.format_exception(error)[-4:]))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    said, complaint = (read_back(stream) for stream in (out, err))
    text = complaint if "--stdout" in arguments else said + complaint  # or it is sound
    if code is not None and code not in CODES:
        wrong.append(f"exit code {code}")
    if "Traceback (most recent call last)" in text:
        wrong.append("a traceback")
    if any(c in text for c in "\x1b\x9b\x07\u202e\x00"):
        wrong.append("a character that steers the terminal")
    if code == 2 and "mmaccel: " not in complaint and "Usage" not in text:
        wrong.append("exit code 2 without a message")
    if sorted(folder.parent.iterdir()) != beside:
        wrong.append("a file beside its folder")
    if any(folder.rglob(hostile.MARKER)):
        wrong.append("code of an input ran")
    return code, wrong


class Stop(set[int]):
    """In place of the models that run: the first one ends its command, as Ctrl-C does."""

    def add(self, _: object) -> None:
        raise KeyboardInterrupt


def limit_memory(more: int) -> tuple[int, int]:
    """Let this process take so many bytes more, beyond which Python raises MemoryError; returns the
    limit before."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(line.split()[1]) * 1024 + more, before[1]))
    return before


def test_no_input_does_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template, folder = tmp_path / "template", tmp_path / "case"
    build_world(template)
    for name in ("TMPDIR", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setattr(run_lock, "_running", Stop())  # ends commands where a model would run
    monkeypatch.setattr(uvicorn.Server, "run", Stop().add)
    before = limit_memory(MEMORY)
    codes: dict[object, int | None] = {}
    failures: dict[object, list[str]] = {}
    for name in (*VALID, *range(CASES)):
        shutil.copytree(template, folder)
        add_nodes(folder)
        case = (shlex.split(name), b"") if isinstance(name, str) else build_case(name, folder)
        codes[name], wrong = run_case(*case, folder)
        if wrong:
            failures[name] = [shlex.join(case[0]), *wrong]
        shutil.rmtree(folder)
    resource.setrlimit(resource.RLIMIT_DATA, before)
    assert not failures
    assert {codes[line] for line in VALID} == {0, 130}
