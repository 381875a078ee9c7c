"""Speech and video nodes at work: the command lines' payloads, interrupts, progress, bad values."""

from __future__ import annotations

import gc
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from PIL import Image

from mmaccel import ImageToVideo, TextToSpeech
from mmaccel.cli import main
from mmaccel.comfy.loading import LOADERS, LoadedModel
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.schemas import v1_class, v3_class
from mmaccel.comfy.speech import pad_sounds
from mmaccel.comfy.values import refusal
from mmaccel.errors import OptionError
from mmaccel.pipelines.text_to_speech.types import Speech, Utterance
from mmaccel.results import Stats
from tests.comfy.fake_comfy import Host, Interrupted, install, policy, run
from tests.fixtures.media import build_media, image
from tests.fixtures.speech import TEXTS

SECONDS = 0.05
START = torch.from_numpy(np.asarray(image()).copy())[None].float() / 255


@dataclass
class Nodes:
    """A loading and a generating node, over a tiny model.

    Attributes:
        word: of both nodes' ids.
        parts: model and codec.
        pipeline: class of the nodes.
        inputs: of the generating node.
        length: tokens that a payload may have.
        outputs: kinds of the generating node's sockets.
    """

    word: str
    parts: tuple[Path, Path]
    pipeline: Any
    inputs: dict[str, Any]
    rows: int
    length: int
    outputs: list[str]

    @property
    def socket(self) -> str:
        """The input that takes the loaded model."""
        return f"{self.word.lower()}_model"

    def load(self, host: Host | None = None, **values: Any) -> LoadedModel:
        """The loaded model."""
        own = {"model": str(self.parts[0]), "codec": f'"{self.parts[1]}"'} | values
        opened: LoadedModel = run(f"Load{self.word}Model", host, **own).values[0]
        return opened

    def make(self, model: LoadedModel, host: Host | None = None, **values: Any) -> tuple[Any, ...]:
        """The generating node's outputs."""
        own = {self.socket: model} | self.inputs | values
        return run(f"Generate{self.word}", host, **own).values

    def content(self, values: tuple[Any, ...]) -> torch.Tensor:
        """Samples or pixels."""
        made: torch.Tensor = values[0]["waveform"] if self.word == "Speech" else values[1]
        return made


@pytest.fixture(scope="module", params=["Speech", "Video"])
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Nodes:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "Speech":
        said = dict(text="\n".join(TEXTS), seed=3, max_seconds=SECONDS)
        kinds = ["AUDIO", "MMACCEL_STATS"]
        return Nodes("Speech", build_media("llasa", folder), TextToSpeech, said, 3, 41, kinds)
    kinds = ["VIDEO", "IMAGE", "MMACCEL_STATS"]
    shown = dict(start=START, seed=7)
    return Nodes("Video", build_media("cosmos", folder), ImageToVideo, shown, 1, 12, kinds)


@pytest.fixture
def model(nodes: Nodes) -> LoadedModel:
    return nodes.load()


def test_payloads_are_the_command_lines(nodes: Nodes, model: LoadedModel, tmp_path: Path) -> None:
    values = nodes.make(model, policy=policy("Jacobi", window=6))
    if nodes.word == "Speech":
        arguments = ["speak", *TEXTS, "--seed", "3", "--max-seconds", str(SECONDS)]
    else:
        image().save(tmp_path / "a.png")
        arguments = ["animate", str(tmp_path / "a.png"), "--seed", "7", "--format", "webp"]
    arguments += ["--window", "6", "--out", str(tmp_path)]
    arguments += ["--model", str(nodes.parts[0]), "--codec", str(nodes.parts[1])]
    assert main(arguments) == 0
    text = run("Stats", stats=values[-1]).text
    assert "policy       jacobi" in text and "bitwise: same seed, same tokens" in text
    if nodes.word == "Speech":
        check_sounds(values[0], sorted(tmp_path.glob("*.wav")), text)
        return
    (video, fps), frames, _ = values
    assert torch.equal((frames * 255).round().byte(), read_webp(next(tmp_path.glob("*.webp"))))
    assert frames.shape == (17, 32, 48, 3) and frames.dtype == torch.float32
    assert torch.equal(video, frames) and fps == 25.0
    assert "seed 7: 17 frames, 1 of them given, 25 a second, " in text


def check_sounds(audio: dict[str, Any], files: list[Path], text: str) -> None:
    waveform, lengths = audio["waveform"], []
    assert audio["sample_rate"] == 16000 and waveform.dtype == torch.float32
    assert waveform.shape[:2] == (3, 1)
    for row, file in zip(waveform, files, strict=True):
        with wave.open(str(file)) as sound:
            samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2")
        lengths.append(len(samples))
        assert np.abs(row[0, : len(samples)].numpy() * 32767 - samples).max() <= 1
        assert not row[0, len(samples) :].any()
    assert max(lengths) == waveform.shape[2] > min(lengths)
    assert f"seed 3: {lengths[0] / 16000:.2f} s" in text and "(cut)" in text
    assert text.index("seed 3: ") < text.index("seed 4: ") < text.index("seed 5: ")


def read_webp(file: Path) -> torch.Tensor:
    frames = []
    with Image.open(file) as opened:
        for page in range(getattr(opened, "n_frames", 1)):
            opened.seek(page)
            frame = torch.from_numpy(np.asarray(opened.convert("RGB")).copy())
            frames += [frame] * (opened.info["duration"] // 40)
    return torch.stack(frames)


def test_fields_are_passed_to_the_pipeline(nodes: Nodes, model: LoadedModel) -> None:
    base = nodes.content(nodes.make(model))
    more = torch.rand(12, 20, 30, 4, generator=torch.Generator().manual_seed(1))
    changes: list[dict[str, Any]] = [dict(seed=8), dict(temperature=0.2), dict(top_k=2)]
    changes += {
        "Speech": [dict(repetition_penalty=2.0), dict(max_seconds=0.02)],
        "Video": [dict(top_p=0.3), dict(start=1 - START), dict(start=more)],
    }[nodes.word]
    for change in changes:
        other = nodes.content(nodes.make(model, **change))
        assert other.shape != base.shape or not torch.equal(other, base), change
    bright = torch.cat((START, torch.zeros(1, 32, 48, 1)), -1) + 1e-7  # as other nodes return it
    same: list[dict[str, Any]] = {
        "Speech": [dict(temperature=0.8, repetition_penalty=1.0, top_p=1.0, batch_size=3)],
        "Video": [dict(temperature=1.0, top_p=0.8, top_k=0), dict(start=bright)],
    }[nodes.word]
    for change in same:
        assert torch.equal(nodes.content(nodes.make(model, **change)), base), change
    if nodes.word == "Video":
        assert "9 of them given" in run("Stats", stats=nodes.make(model, start=more)[-1]).text


def test_no_pass_is_begun_after_an_interrupt(nodes: Nodes, model: LoadedModel) -> None:
    passes: list[object] = []
    hook = model.pipe.model.model.register_forward_pre_hook(lambda *_: passes.append(_))
    try:
        with pytest.raises(Interrupted):
            nodes.make(model, Host(stop_at=4), policy=policy("Autoregressive"))
    finally:
        hook.remove()
    assert len(passes) == 1 + 3  # the prompt's; the first check is before any
    assert nodes.make(model)  # and the model is free


def test_progress_ends_full(
    nodes: Nodes, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = nodes.rows * nodes.length
    for seconds in (-1.0, 1e9):
        host = Host()
        monkeypatch.setattr("mmaccel.comfy.progress._REPORT", seconds)
        nodes.make(model, host, policy=policy("Autoregressive"))
        done = [report[0] for report in host.reports]
        assert done == sorted(set(done)) and done[-1] == total
        assert {report[1] for report in host.reports} == {total}
        assert done[0] == 1 if seconds < 0 else len(done) == nodes.rows  # one a payload
        if seconds < 0 and nodes.word == "Video":
            assert done == list(range(1, 13))


def test_silence_after_the_shorter_ones() -> None:
    def utterance(*values: float) -> Utterance:
        sound = torch.tensor(values)
        return Utterance(0, "a", None, 0, sound, 8000, torch.zeros(1).long(), 1, True)

    made = Speech([utterance(0.5, 0.25), utterance(), utterance(1.0)], Stats())
    assert pad_sounds(made).tolist() == [[[0.5, 0.25]], [[0.0, 0.0]], [[1.0, 0.0]]]
    assert pad_sounds(Speech([utterance()], Stats())).tolist() == [[[0.0]]]


def test_a_model_is_loaded_once_and_memory_is_freed_for_it(nodes: Nodes) -> None:
    host = Host()
    first = nodes.load(host)
    assert nodes.load(host) is first
    weights = sum(
        file.stat().st_size for part in nodes.parts for file in part.iterdir()
        if file.suffix in (".safetensors", ".pt", ".jit")
    )  # fmt: skip
    ((size, device),) = host.freed
    assert device == "cpu" and 2 * weights <= size < 2.5 * weights


def test_bad_values_are_refused_before_anything_is_loaded(nodes: Nodes) -> None:
    spec, local = NODES[f"MMAccelLoad{nodes.word}Model"], {"model": str(nodes.parts[0])}
    assert refusal(spec, local) is None
    assert refusal(spec, {}) is None  # an id of the hub, which only asking it can tell
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": "none"}, "model: expected a folder"),
        (local | {"codec": "none"}, "codec: expected a folder"),
        (local | {"device": "cuda", "cuda_graphs": "on"}, "device: expected"),
    ]
    if nodes.word == "Speech":
        cases.append((local | {"family": "bark"}, "family: expected one of"))
    for values, said in cases:
        refused = refusal(spec, values)
        assert refused is not None and said in refused
    node = NODES[f"MMAccelGenerate{nodes.word}"]
    assert refusal(node, {}) is None
    cases = [({"temperature": -0.5}, "temperature"), ({"top_p": 1.5}, "top_p")]
    cases.append(({"seed": 2**64}, "seed"))
    if nodes.word == "Speech":
        cases += [
            ({"text": " \n "}, "prompt: expected text to say, received ''"),
            ({"repetition_penalty": 0.0}, "penalty: expected a finite number > 0"),
            ({"max_seconds": 4000.0}, "max_seconds: expected a number in 0..3600"),
            ({"batch_size": 0}, "batch_size"),
        ]
    for values, said in cases:
        refused = refusal(node, values)
        assert refused is not None and said in refused, values


def test_what_only_the_model_knows_is_said_in_its_node(
    nodes: Nodes, model: LoadedModel, tiny_folder: Path
) -> None:
    with pytest.raises(OptionError, match="policy: expected one of"):
        nodes.make(model, policy=policy("EntropyBounded"))
    with pytest.raises(OptionError, match="which makes images from prompts"):
        nodes.load(model=str(tiny_folder))
    if nodes.word == "Speech":
        with pytest.raises(OptionError, match="positions: expected at most 160"):
            nodes.make(model, max_seconds=9.0)
        with pytest.raises(OptionError, match="received 'tara';"):
            nodes.make(model, voice=" tara ")


def test_other_files_are_another_model(nodes: Nodes) -> None:
    model, codec = map(str, nodes.parts)
    before = LOADERS[nodes.word].fingerprint(model=model, codec=codec)
    weights(nodes).touch()
    assert LOADERS[nodes.word].fingerprint(model=model, codec=codec) != before
    assert LOADERS[nodes.word].fingerprint(model="owner/name", codec="") == ""
    assert (
        LOADERS[nodes.word].fingerprint(model=model, codec="owner/name") == ""
    )  # which only asking the hub tells


def weights(nodes: Nodes) -> Path:
    """A file of the codec."""
    return next(f for f in nodes.parts[1].iterdir() if f.suffix in (".safetensors", ".jit"))


def test_both_schemas_have_the_native_sockets(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    comfy = install(monkeypatch, with_v3=False)
    loader: Any = v1_class(NODES[f"MMAccelLoad{nodes.word}Model"])
    node: Any = v1_class(NODES[f"MMAccelGenerate{nodes.word}"])
    assert list(node.RETURN_TYPES) == nodes.outputs
    assert node.INPUT_TYPES()["required"]["seed"][1]["control_after_generate"]
    (model,) = loader().execute(model=str(nodes.parts[0]), codec=str(nodes.parts[1]))
    values = node().execute(**({nodes.socket: model} | nodes.inputs))
    if nodes.word == "Speech":
        assert set(values[0]) == {"waveform", "sample_rate"}
        assert values[0]["waveform"].shape[:2] == (3, 1)
    else:
        video, frames, _ = values
        assert torch.equal(video.images, frames) and video.frame_rate == 25 and video.audio is None
    assert comfy.reports[-1][0] == comfy.reports[-1][1]
    install(monkeypatch, with_v3=True)
    schema = v3_class(NODES[f"MMAccelGenerate{nodes.word}"]).define_schema()
    assert [output.io_type for output in schema.outputs] == nodes.outputs


def test_widgets_are_passed_to_the_loader_and_the_cache_is_weak(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, dict[str, Any]]] = []

    def open_pipe(name: Any, **options: Any) -> Any:
        asked.append((name, options))
        return object()

    monkeypatch.setattr(nodes.pipeline, "from_pretrained", open_pipe)
    own = {"family": "orpheus"} if nodes.word == "Speech" else {}
    chosen = dict(dtype="bfloat16", cuda_graphs="off", fused="on", **own)
    first = nodes.load(**chosen)
    wanted = dict(device="cpu", dtype=torch.bfloat16, cuda_graphs=False, fused=True)
    wanted |= {"compile": "auto", **own}
    assert asked == [(str(nodes.parts[0]), wanted | {"codec": str(nodes.parts[1])})]
    assert nodes.load(**chosen) is nodes.load(**chosen | {"dtype": "bf16"}) is first
    others = [{"dtype": "float16"}, {"cuda_graphs": "auto"}, {"fused": "auto"}]
    others += [{"family": "llasa"}] if own else []
    loaded = [nodes.load(**(chosen | other)) for other in others]
    assert len(asked) == 1 + len(others) and first not in loaded
    weights(nodes).touch()  # its files were written again
    assert nodes.load(**chosen) is not first
    gone = ref(first)
    del first
    gc.collect()
    assert gone() is None


def test_seeds_wrap_around_and_batches_and_voices_are_passed_on(
    nodes: Nodes, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    if nodes.word == "Video":
        record = nodes.make(model, seed=2**64 - 2)[-1]
        assert f"seed {2**64 - 2}: " in run("Stats", stats=record).text
        return
    asked: list[dict[str, Any]] = []
    plain = TextToSpeech.__call__

    def call(self: TextToSpeech, *texts: Any, **options: Any) -> Any:
        asked.append(options)
        return plain(self, *texts, **options)

    monkeypatch.setattr(TextToSpeech, "__call__", call)
    record = nodes.make(model, seed=2**64 - 2, batch_size=2, voice="  ")[-1]
    assert asked[0]["seed"] == [2**64 - 2, 2**64 - 1, 0]
    assert asked[0]["batch_size"] == 2 and asked[0]["voice"] is None
    text = run("Stats", stats=record).text
    assert f"seed {2**64 - 2}: " in text and "seed 0: " in text and "seed -" not in text
