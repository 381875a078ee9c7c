"""The cases of the fuzz: a seed makes files and a command line, always the same ones.

`python -m tests.fuzz.cases SEED FOLDER` writes a case into a new folder and runs it.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

from mmaccel.catalog import METHODS, POLICIES, load
from tests.fuzz import hostile, world
from tests.fuzz.world import FACTS, NODES, PROMPTS, RECORD, ROW

MODELS = "../models"  # from the folder in which a case runs
COMMANDS: dict[str, tuple[str, ...]] = {  # valid and quick
    "generate": (PROMPTS[0], "--count", "1"),
    "generate file": ("--prompts", "p.jsonl", "--model", f"{MODELS}/image", "--dry-run"),
    "answer": ("start.png", "what is this?", "--max-tokens", "2"),
    "speak": ("a red fox", "--model", f"{MODELS}/speech", "--codec", f"{MODELS}/speech-codec"),
    "animate": ("start.png", "--model", f"{MODELS}/video", "--codec", f"{MODELS}/video-codec"),
    "gallery": ("pictures", "--against", "pictures", "--out", "page.html"),
    "bench": ("--count", "1", "--policies", "jacobi", "--windows", "8"),
    "bench canvas": ("--family", "canvas", "--model", "grammar-masked", "--policies", "stepwise"),
    "comfy": ("ui", "--force"),
    "doctor": ("--model", "scenes"),
    "models": (),
    "evaluate pictures": ("plain",),
    "evaluate exactness": ("--count", "2", "--samples", "0", "--prompts", "p.txt"),
    "evaluate speed": ("--batch-sizes", "1", "--prompts", "p.txt", "--no-plots"),
    "evaluate words": ("ref.txt", "heard.txt"),
    "evaluate export": tuple(
        "plain --suite partiprompts --prompts suites/partiprompts --out exported "
        "--per-prompt 1".split()
    ),
}
SLOTS = ("tree", "kv_cache", "attention", "visual_tokens")  # an option each, with fields
SLOW = ("doctor", "bench canvas")  # commands that take a large part of a second
ANY = frozenset({0, 2})


@dataclass
class Case:
    """A command line to run in the folder of its files.

    Attributes:
        arguments: of `mmaccel`.
        codes: exit codes that are right.
        stdin: what standard input holds.
    """

    arguments: list[str]
    codes: frozenset[int] = ANY
    stdin: bytes = b""


def build_case(seed: int, folder: Path) -> Case:
    """Write the files of a case into a folder that holds a world, and return its command line."""
    rng = random.Random(seed)
    world.add_nodes(folder)
    kinds: dict[Callable[[random.Random, Path], Case], int] = {  # and how often
        _options: 8, _prompt_file: 5, _fields: 9, _gallery: 3, _pictures: 3, _export: 3, _words: 2,
        _checkpoint: 2, _names: 2, _odd: 2, _salad: 1, _stdin: 1, _text_file: 1, _comfy: 1,
        _card: 1, _callables: 1,
    }  # fmt: skip
    (make,) = rng.choices(list(kinds), list(kinds.values()))
    return make(rng, folder)


def command_line(name: str, rng: random.Random) -> tuple[list[str], list[str]]:
    """The words of a command, and its valid arguments."""
    words = name.split()
    words = words if words[0] == "evaluate" else words[:1]
    return words, list(COMMANDS[name])


def _pick_command(rng: random.Random) -> str:
    name = rng.choice(list(COMMANDS))
    return rng.choice(list(COMMANDS)) if name in SLOW and rng.random() < 0.7 else name


@dataclass(frozen=True)
class Parameter:
    """A parameter of a command: its name, the option or None for an argument, and its type."""

    name: str
    option: str | None
    kind: type


@cache
def parameters(command: str) -> list[Parameter]:
    """The parameters of a command, by the annotations of its function."""
    from mmaccel.cli import app
    from mmaccel.commands.evaluate import evaluate

    infos = [(info, "") for info in app.registered_commands]
    infos += [(info, "evaluate ") for info in evaluate.registered_commands]
    functions = {f"{prefix}{i.name or i.callback.__name__}": i.callback for i, prefix in infos}
    found = []
    for name, hint in get_type_hints(functions[command], include_extras=True).items():
        if name == "return":
            continue
        inner, info = get_args(hint)[:2]
        kinds = [kind for kind in (bool, int, float, Path) if kind in (inner, *get_args(inner))]
        kinds += [Path] if inner == list[Path] else [str]
        names = (info.default, *(info.param_decls or ()))
        given = [text for text in names if isinstance(text, str) and text.startswith("--")]
        option = given[0] if given else f"--{name.replace('_', '-')}"
        is_option = type(info).__name__ == "OptionInfo"
        found.append(Parameter(name, option if is_option else None, kinds[0]))
    return found


def _hostile_value(kind: type, rng: random.Random) -> str:
    pools = {int: hostile.INTEGERS, float: hostile.NUMBERS}
    pool = pools.get(kind, hostile.TEXTS) if rng.random() < 0.6 else hostile.PLAUSIBLE
    return rng.choice(pool if rng.random() < 0.85 else hostile.INTEGERS + hostile.TEXTS)


def _options(rng: random.Random, folder: Path) -> Case:
    """A valid command with hostile values for one to three of its parameters."""
    name = _pick_command(rng)
    words, arguments = command_line(name, rng)
    own, codes = parameters(" ".join(words)), set(ANY)
    for _ in range(rng.choice((1, 1, 1, 2, 3)) if own else 0):
        parameter = rng.choice(own)
        value = _hostile_value(parameter.kind, rng)
        codes |= {1} if parameter.kind is Path else set()  # a folder that nobody can write
        codes |= {1, 3} if parameter.name in ("model", "family", "codec", "decoder") else set()
        codes |= {1} if parameter.name == "play" else set()  # by a package that is not here
        if parameter.option is None:
            arguments[: 1 if arguments and not arguments[0].startswith("-") else 0] = [value]
        elif parameter.kind is bool:
            arguments.append(parameter.option)
        elif rng.random() < 0.5:
            arguments.append(f"{parameter.option}={value}")
        else:
            arguments += [parameter.option, value]
    return Case([*words, *arguments], frozenset(codes | {130} if name == "bench" else codes))


def _fields(rng: random.Random, folder: Path) -> Case:
    """A method of a slot with values that look right for its fields, or that nobody expects."""
    slot = rng.choice(("window", "window", "canvas", "canvas", *SLOTS))
    name = rng.choice(list(METHODS[slot]))
    entry = METHODS[slot][name]
    own = [f.name for f in fields(load(entry.target)) if f.name not in entry.preset]
    own += [rng.choice(("", "self", "name", "__class__", "w\u00efndow", "\x1b[2J", "x y"))]
    values = [
        rng.choice(hostile.PLAUSIBLE if rng.random() < 0.6 else hostile.LITERALS) for _ in range(2)
    ]
    texts = [f"{rng.choice(own)}={value}" for value in values[: rng.choice((1, 1, 2))]]
    if rng.random() >= 0.97:
        texts = [rng.choice(hostile.TEXTS)]
    commands = ("answer",) if slot == "visual_tokens" else ("generate", "answer", "generate file")
    commands = ("generate", "generate file") if slot == "canvas" else commands
    words, arguments = command_line(rng.choice(commands), rng)
    if slot == "canvas":
        arguments += ["--model", "scenes-masked"]
    if slot in ("window", "canvas"):
        arguments += ["--policy", name, *(word for text in texts for word in ("--set", text))]
    else:
        arguments += ["--keep", "0.3"] if slot == "visual_tokens" and rng.random() < 0.7 else []
        arguments += [f"--{slot.replace('_', '-')}", ":".join((name, *texts))]
    of_videos = {1} if slot == "visual_tokens" else set()
    return Case([*words, *arguments], ANY | of_videos)


def _salad(rng: random.Random, folder: Path) -> Case:
    """Words of command lines in no order."""
    pool = [word for name, rest in COMMANDS.items() for word in (*name.split(), *rest)]
    pool += [*hostile.TEXTS[:20], "--set", "--json", "--window", "-h", "--no-such", "--version"]
    words = [rng.choice(pool) for _ in range(rng.randrange(1, 9))]
    if {"comfy", "doctor"} & set(words):
        words.append("--no-such")
    return Case(words, ANY | {1, 3, 130})


def _row(rng: random.Random) -> str:
    """A row of a prompt file with other fields, or with other values for a policy's own."""
    if rng.random() < 0.6:
        return hostile.mutate_object(ROW, rng)
    policy = rng.choice(list(POLICIES))
    names = [f.name for f in fields(load(POLICIES[policy].target))]
    names += ["temperature", "top_k", "top_p", "min_p", "guidance_scale", "processor", "self"]
    params = {rng.choice(names): rng.choice(hostile.VALUES) for _ in range(rng.choice((1, 1, 3)))}
    return json.dumps(ROW | {"policy": policy, "params": params})


def _rows(rng: random.Random) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return hostile.some_bytes(rng)
    lines = [_row(rng) for _ in range(rng.choice((1, 2, 30)))]
    if kind == 1:
        lines.insert(rng.randrange(len(lines)), rng.choice(hostile.JSON_TEXTS))
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    return hostile.mutate(data, rng) if kind == 2 else data


def _prompt_file(rng: random.Random, folder: Path) -> Case:
    suffix = rng.choice(("jsonl", "jsonl", "jsonl", "csv", "txt"))
    file = folder / f"q.{suffix}"
    if suffix == "jsonl":
        file.write_bytes(_rows(rng))
    elif rng.random() < 0.5:
        file.write_bytes(hostile.mutate((folder / f"p.{suffix}").read_bytes(), rng))
    else:
        file.write_bytes(hostile.some_bytes(rng))
    options = " --dry-run --resume --json --json-stream --shard=2/3 --seed=-1 --policy=gsd"
    more = [option for option in [rng.choice(options.split(" "))] if option]
    model = rng.choice(("scenes", "scenes-masked", f"{MODELS}/image"))
    return Case(["generate", "--prompts", file.name, "--model", model, *more], ANY | {3})


def _stdin(rng: random.Random, folder: Path) -> Case:
    return Case(["generate", "--prompts", "-", "--dry-run"], stdin=_rows(rng))


def _spoil_pictures(folder: Path, rng: random.Random) -> None:
    """One to three files of a folder of pictures become others."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        file = rng.choice(sorted(folder.iterdir()))
        kind = rng.randrange(6)
        if kind == 0 and file.is_file():
            file.write_bytes(hostile.mutate(file.read_bytes(), rng))
        elif kind == 1:
            _write_png(folder / f"n{rng.randrange(9)}.png", rng)
        elif kind == 2:
            stem = rng.choice(("o", "manifest.2-of-3", "prompts", "fox_0_0"))
            name = f"{stem}.{rng.choice(('png', 'jsonl'))}"
            if not os.path.lexists(folder / name):
                hostile.odd_file(folder / name, rng)
        elif kind == 3 and file.is_file():
            file.write_bytes(hostile.some_bytes(rng))
        elif file.is_file() or kind == 4:
            lists = [f for f in folder.glob("*.jsonl") if f.is_file()]
            own = (
                RECORD if (folder / "manifest.jsonl").exists() else {"file": "0.png", "prompt": "x"}
            )
            for listed in lists:
                with listed.open("a", encoding="utf-8", errors="surrogatepass") as opened:
                    opened.write(hostile.mutate_object(own, rng) + "\n")
                    opened.write(rng.choice(hostile.JSON_TEXTS) + "\n")


def _write_png(file: Path, rng: random.Random) -> None:
    """A PNG with hostile facts, of an unlike size or kind, or with a header that lies."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    text = rng.choice((hostile.mutate_object(FACTS, rng), rng.choice(hostile.JSON_TEXTS[:-1])))
    info.add_text(
        "mmaccel", text.encode("utf-8", "replace").decode("utf-8"), zip=rng.random() < 0.5
    )
    mode, size = rng.choice(("RGB", "L", "P", "1", "I;16", "RGBA", "LA")), rng.choice((1, 64, 65))
    Image.new(mode, (size, size)).save(file, pnginfo=info)
    if rng.random() < 0.4:
        data = bytearray(file.read_bytes())
        if rng.random() < 0.5:
            data[16:24] = (200_000).to_bytes(4, "big") * 2  # pixels, by the header
        else:
            data = data[: rng.randrange(len(data))]
        file.write_bytes(data)


def _gallery(rng: random.Random, folder: Path) -> Case:
    _spoil_pictures(folder / "pictures", rng)
    more = rng.choice(
        ([], ["--against", "plain"], ["--against", "pictures"], ["--out", "x/page.html"])
    )
    return Case(["gallery", "pictures", *more], ANY | {3})


def _pictures(rng: random.Random, folder: Path) -> Case:
    name = rng.choice(("plain", "pictures"))
    _spoil_pictures(folder / name, rng)
    more = rng.choice(
        ("", "", "--against plain", "--against scenes --count 4", "--items i.jsonl",
         "--clip tests.fuzz.callables:embed")
    )  # fmt: skip
    return Case(["evaluate", "pictures", name, *more.split()], ANY | {1, 3})


def _export(rng: random.Random, folder: Path) -> Case:
    suite = rng.choice(("geneval", "dpg", "hpsv2", "vbench", "partiprompts"))
    source = folder / "suites" / suite
    target = rng.choice(sorted(source.iterdir())) if source.is_dir() else source
    if rng.random() < 0.15:
        target.unlink()
        hostile.odd_file(target, rng)
    elif rng.random() < 0.4:
        target.write_bytes(hostile.some_bytes(rng))
    else:
        target.write_bytes(hostile.mutate(target.read_bytes(), rng))
    if rng.random() < 0.2:
        _spoil_pictures(folder / "plain", rng)
    more = rng.choice(("", "--partial"))
    line = f"evaluate export plain --suite {suite} --prompts suites/{suite} --out exported"
    return Case([*line.split(), "--per-prompt", "1", *more.split()], ANY | {1})


def _words(rng: random.Random, folder: Path) -> Case:
    name = rng.choice(("ref.txt", "heard.txt"))
    data = (folder / name).read_bytes()
    data = hostile.mutate(data, rng) if rng.random() < 0.5 else hostile.some_bytes(rng)
    (folder / name).write_bytes(data)
    if rng.random() < 0.3:
        (folder / "ref.txt").write_bytes((folder / "heard.txt").read_bytes())
    more = rng.choice(([], ["--simplify"], ["--items", "i.jsonl", "--json", "r.json"]))
    return Case(["evaluate", "words", "ref.txt", "heard.txt", *more], ANY | {1})


def _text_file(rng: random.Random, folder: Path) -> Case:
    (folder / "p.txt").write_bytes(hostile.some_bytes(rng))
    words, arguments = command_line(rng.choice(("evaluate exactness", "evaluate speed")), rng)
    return Case([*words, *arguments])


def _comfy(rng: random.Random, folder: Path) -> Case:
    pack = folder / "ui" / "custom_nodes" / "mmaccel-nodes"
    (pack / ".mmaccel.json").write_bytes(hostile.some_bytes(rng))
    if rng.random() < 0.3:
        hostile.odd_file(pack / "x", rng)
    return Case(["comfy", "ui", *rng.choice(([], ["--force"]))])


def _card(rng: random.Random, folder: Path) -> Case:
    """A tiny model whose card or word list is spoiled."""
    own = folder / "own"
    own.mkdir()
    for file in sorted((folder / MODELS / "image").iterdir()):
        (own / file.name).symlink_to(file.resolve())
    name = rng.choice(("card.json", "card.json", "words.json"))
    (own / name).unlink(missing_ok=True)
    (own / name).write_bytes(hostile.some_bytes(rng))
    options = "--count 1 --model own --policies jacobi --windows 8"
    return Case(["bench", "a red circle", *options.split()], ANY | {1, 130})


def _checkpoint(rng: random.Random, folder: Path) -> Case:
    """A tiny checkpoint in which one or two files are spoiled."""
    name = rng.choice(("generate", "doctor", "speak", "animate", "bench"))
    kind = {"speak": "speech", "animate": "video"}.get(name, "image")
    own = folder / "own"
    own.mkdir()
    for file in sorted((folder / MODELS / kind).iterdir()):
        (own / file.name).symlink_to(file.resolve())
    for file in rng.sample(sorted(own.iterdir()), 2 if rng.random() < 0.2 else 1):
        data = file.read_bytes()
        file.unlink()
        if file.suffix == ".json" and rng.random() < 0.6 and data[:1] == b"{":
            text = hostile.mutate_object(json.loads(data), rng)
            file.write_bytes(text.encode("utf-8", "surrogatepass"))
        elif rng.random() < 0.1:
            hostile.odd_file(file, rng)
        elif rng.random() < 0.5:
            file.write_bytes(hostile.mutate(data, rng))
        else:
            file.write_bytes(hostile.some_bytes(rng))
    words, arguments = command_line(name, rng)
    prompt = ["a red circle"] if name == "bench" else []
    return Case([*words, *prompt, *arguments, "--model", "own"], ANY | {1, 130})


def _names(rng: random.Random, folder: Path) -> Case:
    """Names of models and devices that are none, or that steer a terminal."""
    name, option = (
        rng.choice(("generate", "speak", "animate", "bench")),
        rng.choice(("--model", "--device")),
    )
    words, arguments = command_line(name, rng)
    return Case([*words, *arguments, option, rng.choice(hostile.TEXTS)], ANY | {1, 130})


def _callables(rng: random.Random, folder: Path) -> Case:
    """`--features` and `--clip` that are none, raise, or return something else."""
    own = "raises leaves nothing text narrow wide wrong_rows not_finite complex_numbers recursive "
    own += "unprintable number absent embed"
    names = [f"tests.fuzz.callables:{name}" for name in own.split()]
    names += ["tests.fuzz.raising:f", "tests.fuzz.leaving:f", "os:sep", "math:pi", "nothing_here:f"]
    value = rng.choice([*names, *names, *hostile.TEXTS])
    option = (
        ["--clip", value] if rng.random() < 0.4 else ["--against", "plain", "--features", value]
    )
    return Case(["evaluate", "pictures", "plain", *option], ANY | {1})


def _odd(rng: random.Random, folder: Path) -> Case:
    """Something that is no regular file where a command reads one."""
    name = rng.choice(NODES)
    suite = rng.choice(("geneval", "hpsv2", "vbench", "dpg"))
    lines = (
        "generate --prompts NAME",
        "generate _ --model NAME",
        "generate _ --decoder NAME",
        "generate _ --count 1 --out NAME",
        "animate NAME --model MODELS/video",
        "evaluate words NAME heard.txt",
        "evaluate words ref.txt heard.txt --json NAME",
        "evaluate words ref.txt heard.txt --items NAME",
        "evaluate exactness --prompts NAME",
        "evaluate speed --prompts NAME",
        "evaluate pictures NAME",
        f"evaluate export plain --suite {suite} --prompts NAME --out e",
        "gallery NAME",
        "gallery pictures --against NAME",
        "gallery pictures --out NAME",
        "bench --count 1 --json NAME",
        "comfy NAME",
        "doctor --model NAME",
    )
    named = {"NAME": name, "_": "a red circle", "MODELS/video": f"{MODELS}/video"}
    words = [named.get(word, word) for word in rng.choice(lines).split()]
    return Case(words, ANY | {1, 130})


def main(seed: int, folder: Path) -> int:
    """Build a case, print its command line, and run it."""
    world.build_world(folder / "case")
    world.build_models(folder / "models")
    case = build_case(seed, folder / "case")
    program = [sys.executable, "-m", "mmaccel.cli"]
    print(
        f"cd {folder / 'case'} && {shlex.join([*program, *case.arguments])}".encode(
            "utf-8", "surrogateescape"
        ).decode("utf-8", "backslashreplace")
    )
    print(f"right exit codes: {sorted(case.codes)}", flush=True)
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [*program, *case.arguments],
        cwd=folder / "case",
        input=case.stdin,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONPATH": root, "HF_HUB_OFFLINE": "1"},
    )
    print(json.dumps({"exit code": done.returncode}))
    return done.returncode not in case.codes


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
