"""Prompt files, rows and manifests that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from mmaccel.batch.manifest import Manifest, WriteError, check_fresh, manifest_name
from mmaccel.batch.prompts import read_prompts
from mmaccel.errors import BusyError, OptionError
from mmaccel.outputs.whole_files import write_whole
from tests.messages.case import Refused


def _file(name: str, text: str | bytes, *says: str, file: str = "p.jsonl") -> Refused:
    """A prompt file; its name is of the format."""
    data = text if isinstance(text, bytes) else text.encode("utf-8")

    def call() -> object:
        with TemporaryDirectory() as folder:
            path = Path(folder) / file
            path.write_bytes(data)
            return read_prompts(str(path))

    return Refused(name, call, says=says)


def _row(name: str, fields: str, *says: str) -> Refused:
    """A row with a prompt and other fields."""
    return _file(name, f'{{"prompt": "x", {fields}}}', "line 1: ", *says)


def _table(name: str, text: str, *says: str) -> Refused:
    return _file(name, text, *says, file="p.csv")


def _folder(
    name: str, act: Callable[[Path], object], *says: str, error: type[Exception] = OptionError
) -> Refused:
    """What is done in a new folder."""

    def call() -> object:
        with TemporaryDirectory() as folder:
            return act(Path(folder))

    return Refused(name, call, says=says, error=error)


def _link(folder: Path) -> object:
    (folder / "manifest.jsonl").symlink_to(folder / "precious.txt")
    return Manifest(folder / "manifest.jsonl")


def _fresh(folder: Path) -> object:
    (folder / "manifest.jsonl").write_bytes(b"x")
    return check_fresh(folder / "manifest.jsonl")


def _two(first: tuple[int, int] | None, second: tuple[int, int] | None) -> Callable[[Path], object]:
    def act(folder: Path) -> object:
        one = Manifest(folder / manifest_name(first))
        try:
            return Manifest(folder / manifest_name(second))
        finally:
            one.close()

    return act


_ID = "id: expected 1 to 100 letters"
CASES = (
    _row("an unknown field", '"seeds": 1', "'seeds'", "id, prompt", "min_p", "leave it out"),
    _row("no image", '"n": 0', "n: expected an integer in 1..100000", "received 0"),
    _row("a seed of 65 bits", f'"seed": {2**64}', "seed: expected an integer in"),
    _row("a wide image", '"size": "16385x8"', "size: expected pixels", "up to 16384"),
    _row("a number for params", '"params": 3', "params: expected names and values"),
    _row("a path as an id", '"id": "../../etc/x"', _ID, "part of a file name"),
    _row("what steers a terminal", '"id": "\\u001b[2J\\u202e"', _ID, r"'\x1b[2J\u202e'"),
    _row("a name twice", '"prompt": "y"', "a name occurs twice"),
    _row("two names of a field", '"n": 1, "num_images": 2', "'num_images': expected n once"),
    _row("twice", '"top_k": 1, "params": {"top_k": 1}', "top_k: expected it once", "in params too"),
    _row("one side", '"width": 64', "size: expected pixels", "[64, None]; width"),
    _table("a comma", "prompt;top_p\nx;0,5\n", "line 2: top_p: expected", "a point as in 0.5"),
    _file("no prompt", '{"n": 1}', "line 1: prompt: expected text", "write a prompt"),
    _file("a surrogate", '{"prompt": "\\ud800"}', "prompt: expected text", "surrogates"),
    _file("brackets", "[" * 100_000, "line 1: expected JSON"),
    _file("many images", "\n".join(['{"prompt": "x", "n": 100000}'] * 21), "at most 2000000"),
    _file("an id twice", '{"prompt": "x", "id": "a"}\n{"prompt": "y", "id": "A"}', "line 2", "'A'"),
    _file("a long prompt", json.dumps({"prompt": "x" * 900_000}), "20000 characters", "900000"),
    _file("wrong rows", '{"prompt": "x"}\n{"n": 1}\nno', "received 2 that", "line 2:", "line 3:"),
    _file(
        "no UTF-8", b"fine\n\xff\xfe\n", "expected UTF-8", "the byte 0xff in line 2", file="p.txt"
    ),
    _table("no column of prompts", "text\nx\n", "line 1: expected a heading", "'text'"),
    _table("a cell too much", "prompt;n\nx;1;2\n", "line 2: expected 2 cells", "3", "';'"),
    _table(
        "a cell too few", "prompt,n\nx,1\ny\n", "line 3: expected 2 cells", "an empty one takes"
    ),
    _table(
        "no params", f"prompt,params\nx,{'[' * 9}\n", "line 2: params: expected names and values"
    ),
    _table("open quotes", 'prompt\n"x\n', "expected CSV"),
    Refused(
        "no file",
        lambda: read_prompts("none.txt"),
        says=("none or no regular one", "check the path"),
    ),
    _folder("a link as a manifest", _link, "a link", "put the file itself there"),
    _folder("a manifest without --resume", _fresh, "without a manifest.jsonl", "--resume"),
    _folder(
        "a manifest in no folder",
        lambda folder: Manifest(folder / "none" / "manifest.jsonl"),
        "expected a manifest that can be written, received: No such",
        error=WriteError,
    ),
    _folder("two writers", _two(None, None), "another process has open", "wait", error=BusyError),
    _folder(
        "another number of shards",
        _two((1, 2), (1, 3)),
        "manifest.1-of-2.jsonl, which another process writes",
        "the same n in --shard i/n",
        error=BusyError,
    ),
    *(
        Refused(
            f"{name!r} as a file",
            lambda name=name: write_whole(Path(name), lambda path: None),  # type: ignore[misc]
            says=("file: expected a file name", "name a file in a folder"),
        )
        for name in ("/", "-")
    ),
)
