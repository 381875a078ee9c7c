"""What all kinds of nodes do alike: payloads of the command line, interrupts, progress, loading."""

from __future__ import annotations

import gc
import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from PIL import Image

from mmaccel.cli import main
from mmaccel.comfy.loading import LOADERS, LoadedModel
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.schemas import node_class
from mmaccel.comfy.values import refusal
from mmaccel.errors import OptionError
from tests.comfy.fake_comfy import FakeComfy, Host, Interrupted, call, policy, run
from tests.comfy.kinds import N_NEW, START, Kind
from tests.fixtures.media import image, read_webp
from tests.fixtures.speech import TEXTS
from tests.fixtures.tiny_model import CAPTIONS, FPS, N_FRAMES
from tests.fixtures.tiny_vqa import QUESTION, save_scenes

Load = Callable[[Kind], LoadedModel]


def arguments_of(kind: Kind, folder: Path) -> list[str]:
    """The command that does what the node does with the kind's inputs."""
    if kind.word == "":
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
    lengths = []
    assert values[0]["sample_rate"] == 16000 and waveform.dtype == torch.float32
    for row, file in zip(waveform, sorted((folder / "out").glob("*.wav")), strict=True):
        with wave.open(str(file)) as sound:
            samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2")
        lengths.append(len(samples))
        assert np.abs(row[0, : len(samples)].numpy() * 32767 - samples).max() <= 1
        assert not row[0, len(samples) :].any()
    assert waveform.shape == (3, 1, max(lengths)) and min(lengths) < max(lengths)
    text = str(values[-1])
    assert f"seed 3: {lengths[0] / 16000:.2f} s" in text and "(cut)" in text


def check_clip(values: tuple[Any, ...], folder: Path) -> None:
    (video, fps), frames, record = values
    assert torch.equal((frames * 255).round().byte(), read_webp(next(folder.rglob("*.webp"))))
    assert frames.shape == (17, 32, 48, 3) and torch.equal(video, frames) and fps == 25.0
    assert "seed 7: 17 frames, 1 of them given, 25 a second, " in str(record)


def check_prompted_clip(values: tuple[Any, ...], folder: Path) -> None:
    (video, fps), frames, record = values
    assert torch.equal((frames * 255).round().byte(), read_webp(next(folder.rglob("*.webp"))))
    assert frames.shape == (N_FRAMES, 16, 16, 3) and torch.equal(video, frames) and fps == FPS
    assert f"seed 7: {N_FRAMES} frames, 0 of them given" in str(record)
    assert str(record).endswith(CAPTIONS[1])


def check_answer(values: tuple[Any, ...], folder: Path) -> None:
    report = json.loads((folder / "a.json").read_text(encoding="utf-8"))
    assert values[0].split("\n")[0] == report["runs"][0]["text"]


CHECKS = {
    "": check_images,
    "Speech": check_sounds,
    "TextToVideo": check_prompted_clip,
    "Video": check_clip,
    "Vision": check_answer,
}


def test_payloads_are_the_command_lines(kind: Kind, loaded: Load, tmp_path: Path) -> None:
    longer = {"max_seconds": 0.05} if kind.word == "Speech" else {}  # so that one ends by itself
    values = kind.make(loaded(kind), policy=policy("Jacobi", window=6), **longer)
    arguments = arguments_of(kind, tmp_path)
    arguments += [] if kind.word == "Vision" else ["--out", str(tmp_path / "out")]
    for name, path in kind.parts.items():
        arguments += [f"--{name}", str(path)]
    assert main([*arguments, "--window", "6"]) == 0
    CHECKS[kind.word](values, tmp_path)
    text = run("Stats", stats=values[-1]).text or ""
    assert "policy       jacobi, window 6" in text and "bitwise: same seed, same tokens" in text
    assert len(values[-1].lines) == kind.rows and f"{loaded(kind).name} (float32 on cpu)" in text


def test_seeds_wrap_around_and_batches_change_nothing(kind: Kind, loaded: Load) -> None:
    seed = 2**64 - 1
    model = loaded(kind)
    values = kind.make(model, seed=seed, temperature=1.0)
    said = [int(line.split("seed ")[1].split(":")[0]) for line in values[-1].lines]
    assert said == [(seed + k) % 2**64 for k in range(kind.rows)]
    assert "seed 1844" not in kind.make(model, seed=-1, temperature=1.0)[-1].lines[0]  # drawn
    if kind.rows > 1:
        together = kind.make(model, seed=seed, temperature=1.0, batch_size=3)
        assert torch.equal(kind.content(together), kind.content(values))
        assert together[-1].stats.passes < values[-1].stats.passes


CHANGES: dict[str, list[dict[str, Any]]] = {
    "": [dict(guidance_scale=5.0), dict(min_p=0.9)],
    "Speech": [dict(repetition_penalty=2.0), dict(max_seconds=0.01)],
    "TextToVideo": [
        dict(start=START),
        dict(guidance_scale=5.0),
        dict(negative_prompt="blue"),
        dict(prompt=CAPTIONS[2]),
    ],
    "Video": [dict(start=1 - START), dict(start=torch.cat([START] * 12))],
    "Vision": [dict(max_tokens=2)],
}
SAME: dict[str, dict[str, Any]] = {
    "": dict(temperature=1.0),
    "Speech": dict(temperature=0.8, repetition_penalty=1.0, top_p=1.0, voice="  "),
    "TextToVideo": dict(temperature=1.0, guidance_scale=2.0, negative_prompt=" "),
    "Video": dict(temperature=1.0, top_p=0.8, top_k=0),
    "Vision": dict(temperature=0.0),
}


def test_fields_are_passed_to_the_pipeline(kind: Kind, loaded: Load) -> None:
    model = loaded(kind)
    hot = dict(temperature=3.0) if kind.word == "Vision" else {}
    base = kind.content(kind.make(model, **hot))
    for change in [dict(seed=88), dict(temperature=0.1), dict(top_k=2), *CHANGES[kind.word]]:
        other = kind.content(kind.make(model, **(hot | change)))
        assert other.shape != base.shape or not torch.equal(other, base), change
    usual = kind.content(kind.make(model))
    assert torch.equal(kind.content(kind.make(model, **SAME[kind.word])), usual)


def test_no_pass_is_begun_after_an_interrupt(kind: Kind, loaded: Load) -> None:
    """The host is asked before the first pass, and after each."""
    model = loaded(kind)
    passes: list[object] = []
    hook = kind.hidden(model).register_forward_pre_hook(lambda *_: passes.append(_))
    try:
        for stop_at, begun in ((1, 0), (4, kind.prefills + 3)):
            passes.clear()
            with pytest.raises(Interrupted):
                kind.make(model, Host(stop_at), policy=policy("Autoregressive"))
            assert len(passes) == begun
    finally:
        hook.remove()
    assert kind.make(model)  # and the model is free


def test_progress_grows_and_ends_full(
    kind: Kind, loaded: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmaccel.comfy.progress._REPORT", -1.0)
    host = Host()
    kind.make(loaded(kind), host, policy=policy("Autoregressive"))
    done = [report[0] for report in host.reports]
    assert done == sorted(done) and done[-1] == kind.tokens and len(set(done)) > 5
    assert {report[1] for report in host.reports} == {kind.tokens}


def test_a_policy_of_another_kind_is_refused_before_any_pass(kind: Kind, loaded: Load) -> None:
    host = Host()
    with pytest.raises(OptionError, match="'entropy-bounded', which decodes a canvas"):
        kind.make(loaded(kind), host, policy=policy("EntropyBounded"))
    assert host.reports == [] and host.checks == 0


def test_nodes_run_on_comfyui(kind: Kind, comfy: FakeComfy) -> None:
    outputs = node_class(NODES[f"MMAccel{kind.node}"]).GET_SCHEMA().outputs
    assert [output.io_type for output in outputs] == kind.outputs
    parts = {name: str(path) for name, path in kind.parts.items()}
    (model,), _ = call(kind.loader, **parts, device="auto")
    values, _ = call(kind.node, **{kind.socket: model}, **kind.inputs)
    assert len(values) == len(kind.outputs)
    assert comfy.reports[-1][:2] == (kind.tokens, kind.tokens) or kind.word == "Speech"
    assert comfy.reports[-1][0] == comfy.reports[-1][1]
    assert call("Stats", stats=values[-1]) == ((str(values[-1]),), (str(values[-1]),))
    if kind.word in ("TextToVideo", "Video"):
        video = values[0]
        fps = kind.load().pipe.host.fps
        assert torch.equal(video.images, values[1]) and video.frame_rate == fps
        assert video.audio is None
    comfy.stop_at = comfy.checks + 2
    with pytest.raises(Interrupted):
        call(kind.node, **{kind.socket: model}, **kind.inputs)


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
    own = {"family": LOADERS[kind.word].families[-1]} if LOADERS[kind.word].families else {}
    sized = {"width": 32, "height": 16} if kind.word == "" else {}
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
    host = Host()
    first = kind.load(host, dtype="bfloat16")
    files = LOADERS[kind.word].files(**{name: str(path) for name, path in kind.parts.items()})
    size = 2 * sum(file.stat().st_size for file in files)
    assert kind.load(host, dtype="bf16") is first and host.freed == [(size, "cpu")]
    assert host.checks == 1 and size > 2 * kind.weights().stat().st_size
    for other in ({"dtype": "float16"}, {"cuda_graphs": "off"}, {"fused": "off"}):
        assert kind.load(**{"dtype": "bfloat16", **other}) is not first
    for dtype in ("fp32", "float32"):
        assert kind.load(dtype=dtype).dtype == "float32"
    parts = {name: str(path) for name, path in kind.parts.items()}
    cls: Any = node_class(NODES[f"MMAccel{kind.loader}"])
    state = cls.fingerprint_inputs(**parts)
    kind.weights().touch()  # its files were written again
    assert cls.fingerprint_inputs(**parts) != state != ""
    assert kind.load(dtype="bfloat16") is not first
    assert cls.fingerprint_inputs(**(parts | {"model": "owner/name"})) == ""
    if "codec" in parts:
        assert (
            cls.fingerprint_inputs(**(parts | {"codec": "owner/name"})) == ""
        )  # only the hub can tell
    gone = ref(first.pipe)
    gc.disable()
    try:
        del first
        kind.load(dtype="float64")
        assert gone() is None
    finally:
        gc.enable()


def test_interrupts_and_devices_before_a_model_is_loaded(kind: Kind, asked: list[Any]) -> None:
    with pytest.raises(Interrupted):
        kind.load(Host(stop_at=1), dtype="float64")
    host = Host()
    host.device = lambda: "cuda:77"  # type: ignore[method-assign]
    with pytest.raises(OptionError, match="device: expected a device .* received 'cuda:77'"):
        kind.load(host)  # auto is where ComfyUI computes
    assert asked == [] and kind.load(host, device="cpu").dtype == "float32"


def test_defaults_and_ids_of_the_hub_are_not_refused(kind: Kind) -> None:
    spec = NODES[f"MMAccel{kind.loader}"]
    for values in ({}, {"model": "owner/name"}, {"device": "auto", "cuda_graphs": "on"}):
        assert refusal(spec, values) is None  # which only asking the hub or ComfyUI can tell
    assert refusal(NODES[f"MMAccel{kind.node}"], {}) is None
