"""What all kinds of nodes do alike: payloads of the command line, interrupts, progress, loading."""

from __future__ import annotations

import gc
import json
import wave
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from PIL import Image

from mmaccel.cli import main
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.schemas import node_class
from mmaccel.errors import OptionError
from tests.comfy.fake_comfy import FakeComfy, Interrupted, execute, policy, run
from tests.comfy.kinds import KINDS, N_NEW, START, Kind
from tests.fixtures.media import image, read_webp
from tests.fixtures.speech import TEXTS
from tests.fixtures.tiny_model import CAPTIONS, FPS, N_FRAMES
from tests.fixtures.tiny_vqa import QUESTION, save_scenes


def arguments_of(kind: Kind, folder: Path) -> list[str]:
    """The command that does what the node does with the kind's inputs."""
    if kind.word == "Images":
        return ["generate", *CAPTIONS[:2], "--seed", "7"]
    if kind.word == "Speech":
        return ["speak", *TEXTS, "--seed", "3", "--max-seconds", "0.05"]
    if kind.word == "TextToVideo":
        return ["animate", CAPTIONS[1], "--seed", "7", "--format", "webp"]
    if kind.word == "Video":
        image().save(folder / "a.png")
        return ["animate", str(folder / "a.png"), "--seed", "7", "--format", "webp"]
    scene = str(save_scenes(folder)[0])
    return ["answer", scene, QUESTION, "--max-tokens", str(N_NEW), "--json", str(folder / "a.json")]


def check_images(values: tuple[Any, ...], folder: Path) -> None:
    files = sorted((folder / "out").glob("0*.png"))
    assert [int(file.name[:4]) for file in files] == [7, 8]
    for pixels, file in zip(values[0], files, strict=True):
        # as ComfyUI's SaveImage turns it into bytes
        shown = (255.0 * pixels).clamp(0, 255).to(torch.uint8).numpy()
        with Image.open(file) as written:
            assert np.array_equal(shown, np.asarray(written))


def check_sounds(values: tuple[Any, ...], folder: Path) -> None:
    waveform = values[0]["waveform"]
    assert values[0]["sample_rate"] == 16000 and waveform.dtype == torch.float32
    lengths = []
    for row, file in zip(waveform, sorted((folder / "out").glob("*.wav")), strict=True):
        with wave.open(str(file)) as sound:
            samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2")
        lengths.append(len(samples))
        assert np.abs(row[0, : len(samples)].numpy() * 32767 - samples).max() <= 1
        assert not row[0, len(samples) :].any()
    assert waveform.shape == (3, 1, max(lengths)) and min(lengths) < max(lengths)
    assert f"seed 3: {lengths[0] / 16000:.2f} s" in values[-1] and "(cut)" in values[-1]


def check_clip(values: tuple[Any, ...], folder: Path) -> None:
    video, frames, stats = values
    assert torch.equal((frames * 255).round().byte(), read_webp(next(folder.rglob("*.webp"))))
    assert torch.equal(video.images, frames) and video.audio is None
    is_prompted = len(frames) == N_FRAMES
    assert video.frame_rate == (FPS if is_prompted else 25)
    assert f"seed 7: {len(frames)} frames, {int(not is_prompted)} of them given, 25 a sec" in stats
    assert stats.endswith(CAPTIONS[1]) is is_prompted


def check_answer(values: tuple[Any, ...], folder: Path) -> None:
    report = json.loads((folder / "a.json").read_text(encoding="utf-8"))
    assert values[0].split("\n")[0] == report["runs"][0]["text"]


CHECKS = dict(Images=check_images, Speech=check_sounds, Vision=check_answer)


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_payloads_are_the_command_lines(kind: Kind, tmp_path: Path) -> None:
    longer = {"max_seconds": 0.05} if kind.word == "Speech" else {}  # so that one ends by itself
    values = kind.make(policy=policy("Jacobi", window=6), **longer)
    arguments = arguments_of(kind, tmp_path)
    arguments += [] if kind.word == "Vision" else ["--out", str(tmp_path / "out")]
    for name, path in kind.parts.items():
        arguments += [f"--{name}", str(path)]
    assert main([*arguments, "--window", "6"]) == 0
    CHECKS.get(kind.word, check_clip)(values, tmp_path)
    shown = execute("Stats", stats=values[-1])
    assert shown.args == (values[-1],) and shown.ui == {"text": (values[-1],)}
    assert "policy       jacobi, window 6" in values[-1]
    assert "bitwise: same seed, same tokens" in values[-1]
    assert f"{kind.model.name} (float32 on cpu)" in values[-1]


CHANGES: dict[str, list[dict[str, Any]]] = {
    "Images": [dict(guidance_scale=5.0), dict(min_p=0.9)],
    "Speech": [dict(repetition_penalty=2.0), dict(max_seconds=0.01)],
    "TextToVideo": [dict(start=START), dict(guidance_scale=5.0), dict(negative_prompt="blue")],
    "Video": [dict(start=1 - START), dict(start=torch.cat([START] * 12))],
    "Vision": [dict(max_tokens=2)],
}


def test_fields_are_passed_to_the_pipeline(kind: Kind) -> None:
    hot = dict(temperature=3.0) if kind.word == "Vision" else {}
    base = kind.content(kind.make(**hot))
    for change in [dict(seed=88), dict(temperature=0.1), dict(top_k=2), *CHANGES[kind.word]]:
        other = kind.content(kind.make(**(hot | change)))
        assert other.shape != base.shape or not torch.equal(other, base), change


@pytest.mark.parametrize(
    ("node", "slot"), [("SnapkvKVCache", "kv_cache"), ("QuestAttention", "attention")]
)
def test_methods_for_layers_reach_the_run(kind: Kind, node: str, slot: str) -> None:
    small = {"budget": 4, "window": 2}
    if slot == "attention":
        small = {"budget": 0.1, "block": 1, "first_layer": 0}
    (method,) = run(node, **small)
    assert repr(method) in kind.make(batch_size=kind.rows, **{slot: method})[-1]


def test_no_pass_is_begun_after_an_interrupt(kind: Kind, comfy: FakeComfy) -> None:
    """ComfyUI is asked before the first pass, and after each."""
    pipe = kind.model.pipe
    hidden = pipe.model.get_decoder() if kind.word == "Vision" else pipe.model.model
    prefills = 0 if kind.word == "Vision" else 1
    passes: list[object] = []
    hook = hidden.register_forward_pre_hook(lambda *_: passes.append(_))
    try:
        for stop_at, begun in ((1, 0), (4, prefills + 3)):
            passes.clear()
            comfy.reset(stop_at)
            with pytest.raises(Interrupted):
                kind.make(policy=policy("Autoregressive"))
            assert len(passes) == begun
    finally:
        hook.remove()
    assert kind.make()  # and the model is free


def test_progress_grows_and_ends_full(
    kind: Kind, comfy: FakeComfy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmaccel.comfy.progress._REPORT", -1.0)
    kind.make(policy=policy("Autoregressive"))
    done = [report[0] for report in comfy.reports]
    assert done == sorted(done) and done[-1] == kind.tokens and len(set(done)) > 5
    assert {report[1] for report in comfy.reports} == {kind.tokens}


class Opened:
    """Stands in for a pipeline; a reference cycle must not keep it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def asked(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What models are opened with, none of which is."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def open_pipe(name: Any, **options: Any) -> Opened:
        calls.append((name, options))
        return Opened()

    monkeypatch.setattr(kind.pipeline, "from_pretrained", open_pipe)
    return calls


def test_widgets_are_passed_to_the_loader(kind: Kind, asked: list[Any]) -> None:
    (family,) = [
        each.options["options"][-1]
        for each in NODES[f"MMAccel{kind.loader}"].widgets
        if each.name == "family"
    ] or [None]
    own = {"family": family} if family else {}
    sized = {"width": 32, "height": 16} if kind.word == "Images" else {}
    kind.load(dtype="bfloat16", cuda_graphs="off", fused="on", compile="off", **own, **sized)
    wanted = {"device": "cpu", "dtype": torch.bfloat16, "cuda_graphs": False, "fused": True}
    wanted |= {"compile": False, "prefill_chunk_size": None, "share_prefix": False, **own}
    wanted |= {"size": (32, 16), "decoder": None} if sized else {}
    wanted |= {"text_encoder": None} if kind.word == "Video" else {}
    wanted |= {name: str(path) for name, path in kind.parts.items() if name != "model"}
    assert asked == [(str(kind.parts["model"]), wanted)]


def test_a_model_is_loaded_once_and_again_when_its_files_change(
    kind: Kind, asked: list[Any], comfy: FakeComfy
) -> None:
    """The cache holds it weakly, and one nobody holds is gone before another is loaded."""
    last = list(kind.parts.values())[-1]
    weights = next(file for file in last.iterdir() if file.suffix in (".safetensors", ".jit"))
    first = kind.load(dtype="bfloat16")
    assert kind.load(dtype="bf16") is first
    (size,) = comfy.freed
    assert comfy.checks == 1 and size > 2 * weights.stat().st_size
    for other in ({"dtype": "float16"}, {"cuda_graphs": "off"}, {"fused": "off"}):
        assert kind.load(**{"dtype": "bfloat16", **other}) is not first
    parts = {name: str(path) for name, path in kind.parts.items()}
    cls: Any = node_class(NODES[f"MMAccel{kind.loader}"])
    state = cls.fingerprint_inputs(**parts)
    weights.touch()  # its files were written again
    assert cls.fingerprint_inputs(**parts) != state != ""
    assert kind.load(dtype="bfloat16") is not first
    for part in parts:  # only the hub can tell
        assert cls.fingerprint_inputs(**(parts | {part: "owner/name"})) == ""
    gone = ref(first.pipe)
    gc.disable()
    try:
        del first
        kind.load(dtype="float64")
        assert gone() is None
    finally:
        gc.enable()


def test_interrupts_and_devices_before_a_model_is_loaded(
    kind: Kind, asked: list[Any], comfy: FakeComfy
) -> None:
    comfy.stop_at = 1
    with pytest.raises(Interrupted):
        kind.load(dtype="float64")
    comfy.device = "mps"
    with pytest.raises(OptionError, match="device: expected a device .* received 'mps'"):
        kind.load()  # auto is where ComfyUI computes
    assert asked == [] and kind.load(device="cpu").dtype == "float32"
    assert comfy.freed == []  # of another device
