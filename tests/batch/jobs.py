"""Jobs of the tiny model: their command, and what they leave."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from mmaccel.cli import main
from tests.fixtures.tiny_model import CAPTIONS

Rows = Sequence[dict[str, Any]]
ROWS: Rows = (
    {"id": "one", "prompt": CAPTIONS[0], "n": 3},
    {"id": "two", "prompt": CAPTIONS[1], "n": 2, "params": {"temperature": 0.5}},
    {"id": "three", "prompt": CAPTIONS[2], "policy": "autoregressive", "seed": 9},
)
N_ITEMS = 6


class Jobs:
    """Jobs into `folder / "out"`, with seed 3 and a window of 5.

    Attributes:
        out: folder of their images.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._model = folder, model
        self.out = folder / "out"

    @property
    def manifest(self) -> Path:
        """The manifest of a job without shards."""
        return self.out / "manifest.jsonl"

    def arguments(self, *more: str, rows: Rows = ROWS, seed: str | None = "3") -> list[str]:
        """Of the command; writes the prompt file."""
        self._folder.mkdir(exist_ok=True)
        file = self._folder / "prompts.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        fixed = ["--prompts", str(file), "--model", str(self._model), "--out", str(self.out)]
        own = [] if seed is None else ["--seed", seed]
        return ["generate", *fixed, *own, "--window", "5", *more]

    def run(self, *more: str, rows: Rows = ROWS, seed: str | None = "3") -> int:
        """The exit code."""
        return main(self.arguments(*more, rows=rows, seed=seed))


def content(out: Path) -> dict[str, bytes]:
    """Name and bytes of every image; each can be opened, and nothing but manifests is there too."""
    files = sorted(out.iterdir())
    assert {f.suffix for f in files} <= {".png", ".jsonl"} and all(f.name[0] != "." for f in files)
    images = [file for file in files if file.suffix == ".png"]
    for file in images:
        with Image.open(file) as image:
            image.load()
    return {file.name: file.read_bytes() for file in images}


def lines(out: Path) -> list[bytes]:
    """All lines of all manifests, sorted; each is whole, and each item has one."""
    found = []
    for file in out.glob("manifest*.jsonl"):
        data = file.read_bytes()
        assert not data or data.endswith(b"\n")
        found += data.splitlines()
    keys = [(record["id"], record["k"]) for record in map(json.loads, found)]
    assert len(set(keys)) == len(keys)
    return sorted(found)


def records(out: Path) -> list[dict[str, Any]]:
    """The records of `lines`."""
    return list(map(json.loads, lines(out)))
