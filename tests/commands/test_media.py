"""`mmaccel generate`, `animate` and `speak`: what their files hold, how they are named, and what
stays when a run ends early.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.loading.sources import content_hash
from mmaccel.tokenizers_vq.speech_codec import save_codec
from tests.fixtures.jobs import (
    KINDS,
    PROMPTED,
    SECONDS,
    Command,
    at_render,
    at_write,
    folders,
    raise_full,
)
from tests.fixtures.media import image
from tests.fixtures.tiny_model import FPS, N_FRAMES
from tests.fixtures.voices import build_codec

Said = pytest.CaptureFixture[str]


IMAGES, *OTHERS = KINDS


@pytest.fixture(params=[IMAGES, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> Command:
    return Command(request.param, tmp_path)


FACTS: dict[str, dict[str, Any]] = {
    "images": {"guidance_scale": 2.0, "width": 16, "height": 16, "top_k": None},
    "clips": {"guidance_scale": 2.0, "frames": N_FRAMES, "fps": FPS, "n_given": 0},
    "speech": {"sample_rate": 16_000, "max_seconds": SECONDS, "repetition_penalty": 1.0},
    "continuations": {"start": "red fox.png", "n_given": 1, "frames": 17, "fps": 25.0},
}


@pytest.mark.parametrize("command", KINDS, indirect=True)
def test_files_hold_what_the_pipeline_returns(command: Command, capsys: Said) -> None:
    assert command.make(3, "--window", 5, "--batch-size", 2) == 0
    assert re.search(rf"3 {command.unit}s.* in {command.out}.*: \d+ tok", capsys.readouterr().out)
    wanted = command.expect(command.inputs, [3, 4, 5], policy=mmaccel.Jacobi(window=5))
    for k, (file, (made, pixels)) in enumerate(zip(command.files, wanted, strict=True)):
        facts = command.facts(file)
        assert command.read(file) == pixels and file.name.startswith(f"000{3 + k}-")
        passes = made.passes if command.kind != "images" else int(made.passes[k])
        assert (facts["seed"], facts["passes"]) == (3 + k, passes)
        assert (facts["policy"], facts["exactness"]) == ("jacobi", "bitwise")
        assert facts["policy_options"]["window"] == 5
        assert facts["versions"]["mmaccel"] == mmaccel.__version__
        assert FACTS[command.kind].items() <= facts.items()
        assert command.kind == "continuations" or facts["prompt"] == command.inputs[k]
        for name, folder in zip(("weights", "codec"), folders(command.kind)):
            assert facts[name] == content_hash(folder)


def test_a_name_changes_with_what_an_item_depends_on_and_only_then(
    command: Command, tmp_path: Path
) -> None:
    """The batch size is a part of it where an acceptance may depend on the last bit."""
    model = folders(command.kind)[0]
    same = [(), ("--batch-size", 2), ("--model", model / ".." / model.name)]
    others = [
        ("--temperature", 0.5), ("--top-k", 5), ("--window", 3), ("--dtype", "bfloat16"),
        ("--policy", "mc-sjd"), ("--policy", "mc-sjd", "--batch-size", 2),
    ]  # fmt: skip
    if command.kind in ("images", "clips"):
        others += [("--negative", "red"), ("--guidance-scale", 1)]
    if command.kind == "clips":
        image().save(tmp_path / "a.png")
        others += [("--start", tmp_path / "a.png")]
    if command.kind == "speech":
        save_codec(build_codec(seed=6), tmp_path / "codec", torch.float32)
        others += [("--voice", "ben"), ("--max-seconds", 0.3), ("--codec", tmp_path / "codec")]
    if command.kind == "images":
        others += [("--kv-cache", "streaming-llm:budget=3:sinks=1")]
    for options in same:
        assert command.make(1, *options) == 0
    assert len(command.files) == 1
    for k, options in enumerate(others):
        assert command.make(1, *options) == 0
        assert len(command.files) == 2 + k, options
    assert command.make(1, seed=4) == 0 and len(command.files) == 2 + len(others)


def test_a_drawn_seed_is_said_and_makes_the_same_files(command: Command, capsys: Said) -> None:
    assert command.make(2, seed=None) == 0
    found = re.match(r"seed: (\d+), drawn; .* --seed \1 makes the same", capsys.readouterr().out)
    assert found is not None
    made = command.content
    shutil.rmtree(command.out)
    assert command.make(2, seed=int(found[1])) == 0
    assert command.content == made and len(made) == 2
    assert ", drawn" not in capsys.readouterr().out
    assert command.make(2, seed=-1) == 0 and len(command.files) == 4


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("disturb", "code", "n", "says"),
    [
        ("a signal while a file is written", 130, 2, "stopped; 2 of 3 {unit}s are in {out}"),
        ("a signal in the model", 130, 1, "stopped; 1 of 3 {unit}s are in {out}"),
        ("a full disk", 1, 1, "expected space and permission to write {one}, received: No space"),
    ],
)
def test_written_files_remain_and_nothing_half(
    command: Command, disturb: str, code: int, n: int, says: str, capsys: Said
) -> None:
    changes = {
        "a signal while a file is written": at_write(2, command.suffix, interrupt),
        "a signal in the model": at_render(2, command.kind, KeyboardInterrupt()),
        "a full disk": at_write(2, command.suffix, raise_full),
    }
    with changes[disturb]:
        assert command.make(3) == code
    assert len(command.files) == n
    (line,) = [e for e in capsys.readouterr().err.splitlines() if e.startswith("mmaccel: ")]
    one = f"a{'n' if command.unit[0] in 'iu' else ''} {command.unit}"
    assert says.format(unit=command.unit, out=command.out, one=one) in line


def test_flags_reach_the_pipeline(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def from_pretrained(*_: Any, **options: Any) -> None:
        asked.update(options)
        raise OptionError("model: not loaded")

    monkeypatch.setattr(KINDS[command.kind][3], "from_pretrained", from_pretrained)
    flags = ("--no-fused", "--dtype", "fp16", "--cuda-graphs", "off", "--trust-remote-code")
    expected = {"fused": False, "dtype": "float16", "cuda_graphs": False, "device": "cpu"}
    for call in (partial(command.make, 1), command.job)[: 1 + (command.kind in PROMPTED)]:
        asked.clear()
        assert call(*flags) == 2
        assert (expected | {"trust_remote_code": True}).items() <= asked.items()
