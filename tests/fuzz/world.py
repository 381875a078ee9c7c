"""A small folder of valid inputs, which the cases of the fuzz spoil, and tiny models."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

from tests.fuzz.hostile import make_zero

PROMPTS = ("a red circle above a small blue square on grass", "a large yellow star at night")
FACTS: dict[str, Any] = {
    "prompt": PROMPTS[0], "seed": 0, "model": "scenes", "policy": "jacobi",
    "policy_options": {"window": 32}, "exactness": "bitwise", "guidance_scale": 1.0,
    "temperature": 1.0, "top_k": None, "top_p": None, "min_p": None, "dtype": "float32",
    "device": "cpu", "weights": "0" * 64, "tokens": 256, "passes": 60, "versions": {"mmaccel": "0"},
}  # fmt: skip
RECORD: dict[str, Any] = {
    "id": "fox", "k": 0, "status": "ok", "file": "fox_0_0.png", "bytes": 1, "sha256": "0" * 64,
    "prompt": PROMPTS[0], "seed": 0, "policy": "jacobi", "exactness": "bitwise", "passes": 60,
    "fingerprint": "00000000",
}  # fmt: skip
ROW: dict[str, Any] = {
    "id": "fox", "prompt": PROMPTS[0], "seed": 3, "n": 2, "size": "64x64", "policy": "jacobi",
    "params": {"window": 8, "temperature": 0.9},
}  # fmt: skip
NODES = ("zero.jsonl", "zero.png", "fifo.jsonl", "fifo.png", "loop.txt", "folder.txt", "socket.csv")


def build_world(folder: Path) -> None:
    """Write the valid inputs, each a few hundred bytes."""
    folder.mkdir(parents=True)
    lines = [json.dumps(ROW | {"id": f"r{k}", "prompt": text}) for k, text in enumerate(PROMPTS)]
    _write(folder / "p.jsonl", "\n".join(lines) + "\n")
    _write(folder / "p.txt", "\n".join(PROMPTS) + "\n")
    _write(folder / "p.csv", f"id,prompt,n\na,{PROMPTS[0]},1\nb,{PROMPTS[1]},2\n")
    _write(folder / "ref.txt", "the cat sat on the mat\na b c\n")
    _write(folder / "heard.txt", "a cat sat the mat now\na b\n")
    _write(folder / "empty.jsonl", "")
    (folder / "ui" / "custom_nodes").mkdir(parents=True)
    _write(folder / "ui" / "custom_nodes" / "mmaccel-nodes" / ".mmaccel.json", "{}")
    _build_suites(folder / "suites")
    for name, is_ours in (("pictures", True), ("plain", False)):
        _build_pictures(folder / name, is_ours)
    shutil.copy(folder / "plain" / "0.png", folder / "start.png")


def add_nodes(folder: Path) -> None:
    """Add files that are no regular files; they cannot be copied with the others."""
    for name in ("zero.jsonl", "zero.png"):
        make_zero(folder / name)
    for name in ("fifo.jsonl", "fifo.png"):
        os.mkfifo(folder / name)
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "folder.txt").mkdir()
    with socket.socket(socket.AF_UNIX) as opened:
        before = os.getcwd()
        os.chdir(folder)  # the path of a socket has at most 107 bytes
        try:
            opened.bind("socket.csv")
        finally:
            os.chdir(before)


def build_models(folder: Path) -> None:
    """Write tiny models: `image`, `speech`, `speech-codec`, `video`, `video-codec`."""
    from tests.fixtures.media import build_media
    from tests.fixtures.tiny_model import build_tiny

    build_tiny(folder / "image")
    for name, kind in (("speech", "llasa"), ("video", "cosmos")):
        model, codec = build_media(kind, folder / f"{name}-parts")
        (folder / name).symlink_to(model)
        (folder / f"{name}-codec").symlink_to(codec)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def _build_suites(folder: Path) -> None:
    rows = [json.dumps({"tag": "one", "prompt": text, "include": []}) for text in PROMPTS]
    _write(folder / "geneval", "\n".join(rows) + "\n")
    for k, text in enumerate(PROMPTS):
        _write(folder / "dpg" / f"{k}.txt", text)
    _write(folder / "hpsv2", json.dumps(list(PROMPTS)))
    _write(folder / "vbench", "\n".join(PROMPTS) + "\n")
    table = "".join(f"{text}\tArts\tBasic\n" for text in PROMPTS)
    _write(folder / "partiprompts", f"Prompt\tCategory\tChallenge\n{table}")


def _build_pictures(folder: Path, is_ours: bool) -> None:
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    folder.mkdir()
    lines = []
    for k in range(3):
        info, facts = PngInfo(), FACTS | {"seed": k, "prompt": PROMPTS[k % 2]}
        if is_ours:
            info.add_text("mmaccel", json.dumps(facts))
        name = f"fox_{k}_{k}.png" if is_ours else f"{k}.png"
        Image.new("RGB", (64, 64), (k * 40, 90, 20)).save(folder / name, pnginfo=info)
        own = {"file": name, "prompt": facts["prompt"], "seed": k}
        lines.append(json.dumps(RECORD | own | {"k": k} if is_ours else own))
    _write(folder / ("manifest.jsonl" if is_ours else "prompts.jsonl"), "\n".join(lines) + "\n")
