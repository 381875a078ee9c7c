"""A small folder of valid inputs and tiny models, which the cases of the fuzz spoil."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.fixtures.media import build_media
from tests.fixtures.tiny_model import CAPTIONS, build_tiny

FACTS: dict[str, Any] = {
    "prompt": CAPTIONS[0], "seed": 0, "model": "scenes", "policy": "jacobi",
    "policy_options": {"window": 32}, "exactness": "bitwise", "guidance_scale": 1.0,
    "dtype": "float32", "device": "cpu", "weights": "0" * 64, "tokens": 256, "passes": 60,
}  # fmt: skip
RECORD = {"id": "fox", "k": 0, "status": "ok", "bytes": 1, "sha256": "0" * 64, "fingerprint": "0"}
ROW = {"prompt": CAPTIONS[0], "seed": 3, "n": 2, "policy": "jacobi", "params": {"window": 8}}


def build_world(folder: Path) -> None:
    """Write the valid inputs, each a few hundred bytes, and the models."""
    folder.mkdir(parents=True)
    rows = [json.dumps(ROW | {"id": f"r{k}", "prompt": text}) for k, text in enumerate(CAPTIONS)]
    texts = {
        "p.jsonl": "\n".join(rows),
        "p.txt": "\n".join(CAPTIONS),
        "p.csv": f"id,prompt,n\na,{CAPTIONS[0]},1\nb,{CAPTIONS[1]},2\n",
        "empty.jsonl": "",
        "ui/custom_nodes/mmaccel-nodes/.mmaccel.json": "{}",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    for name, manifest in (("pictures", "manifest.jsonl"), ("plain", "prompts.jsonl")):
        (folder / name).mkdir()
        lines = []
        for k in range(3):
            own = FACTS | {"seed": k, "prompt": CAPTIONS[k]}
            info = PngInfo()
            info.add_text("mmaccel", json.dumps(own))
            file = f"fox_{k}_{k}.png"
            Image.new("RGB", (64, 64), (k * 40, 90, 20)).save(folder / name / file, pnginfo=info)
            lines.append(json.dumps(own | RECORD | {"file": file, "k": k}))
        (folder / name / manifest).write_text("\n".join(lines), encoding="utf-8")
    shutil.copy(folder / "plain" / "fox_0_0.png", folder / "start.png")
    build_tiny(folder / "own")
    for name, kind in (("speech", "llasa"), ("video", "cosmos")):
        model, codec = build_media(kind, folder / f"{name}-parts")
        model.rename(folder / name)
        codec.rename(folder / f"{name}-codec")


def add_nodes(folder: Path) -> None:
    """Add files that are no regular files; they cannot be copied with the others."""
    for name in ("zero.jsonl", "zero.png"):
        try:
            os.mknod(folder / name, stat.S_IFCHR | 0o444, os.makedev(1, 5))  # as /dev/zero
        except OSError:  # this user may make no nodes
            os.mkfifo(folder / name)
    for name in ("fifo.jsonl", "fifo.png"):
        os.mkfifo(folder / name)
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "folder.txt").mkdir()
