"""Speech nodes at work: the command line's sound, interrupts, progress, bad values."""

from __future__ import annotations

import gc
import wave
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch

from mmaccel.cli import main
from mmaccel.comfy.coded_model import coded_state
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.open_speaker import OpenSpeaker
from mmaccel.comfy.speech import pad_sounds
from mmaccel.comfy.v1 import v1_class
from mmaccel.comfy.v3 import v3_class
from mmaccel.comfy.values import refusal
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.speech import Speech, Utterance
from mmaccel.pipelines.text_to_speech import TextToSpeech
from mmaccel.results import Stats
from tests.comfy.fake_comfy import Interrupted, install
from tests.comfy.test_running import Host, policy, run
from tests.speech_beds import TEXTS, build_speech

SECONDS = 0.05


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_speech("llasa", tmp_path_factory.mktemp("llasa"))


@pytest.fixture
def speaker(parts: tuple[Path, Path]) -> OpenSpeaker:
    return load(parts).values[0]


def load(parts: tuple[Path, Path], host: Host | None = None) -> Any:
    return run("LoadSpeechModel", host, model=str(parts[0]), codec=f'"{parts[1]}"')


def say(speaker: OpenSpeaker, host: Host | None = None, **values: Any) -> Any:
    usual = dict(text="\n".join(TEXTS), seed=3, max_seconds=SECONDS)
    return run("GenerateSpeech", host, speech_model=speaker, **(usual | values))


def test_sound_is_the_command_lines(
    speaker: OpenSpeaker, parts: tuple[Path, Path], tmp_path: Path
) -> None:
    audio, record = say(speaker, policy=policy("Jacobi", window=6), batch_size=2).values
    arguments = ["speak", *TEXTS, "--seed", "3", "--window", "6", "--max-seconds", str(SECONDS)]
    arguments += ["--model", str(parts[0]), "--codec", str(parts[1]), "--out", str(tmp_path)]
    assert main(arguments) == 0
    waveform = audio["waveform"]
    assert audio["sample_rate"] == 16000 and waveform.dtype == torch.float32
    assert waveform.shape[:2] == (3, 1)
    lengths = []
    for row, file in zip(waveform, sorted(tmp_path.glob("*.wav")), strict=True):
        with wave.open(str(file)) as sound:
            samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2")
        lengths.append(len(samples))
        assert np.abs(row[0, : len(samples)].numpy() * 32767 - samples).max() <= 1
        assert not row[0, len(samples) :].any()
    assert max(lengths) == waveform.shape[2] > min(lengths)
    text = run("Stats", stats=record).text
    assert "policy       jacobi" in text and "bitwise: same seed, same tokens" in text
    assert f"seed 3: {lengths[0] / 16000:.2f} s" in text and "(cut)" in text


def test_fields_reach_the_pipeline(speaker: OpenSpeaker) -> None:
    base = say(speaker).values[0]["waveform"]
    for change in (dict(seed=4), dict(temperature=0.2), dict(repetition_penalty=2.0),
                   dict(top_k=2), dict(max_seconds=0.02)):  # fmt: skip
        other = say(speaker, **change).values[0]["waveform"]
        assert other.shape != base.shape or not torch.equal(other, base), change
    same = say(speaker, temperature=0.8, repetition_penalty=1.0, top_p=1.0, batch_size=3)
    assert torch.equal(same.values[0]["waveform"], base)
    with pytest.raises(OptionError, match="voice: expected none for Llasa"):
        say(speaker, voice="tara")


def test_no_pass_is_begun_once_the_interrupt_was_seen(speaker: OpenSpeaker) -> None:
    passes: list[object] = []
    window: Any = speaker.pipe.model
    hook = window.model.register_forward_pre_hook(lambda *_: passes.append(_))
    try:
        with pytest.raises(Interrupted):
            say(speaker, Host(stop_at=4), policy=policy("Autoregressive"))
    finally:
        hook.remove()
    assert len(passes) == 1 + 3  # the prompt's; the first check is before any
    assert say(speaker)  # and the model is free


def test_progress_ends_full(speaker: OpenSpeaker, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    monkeypatch.setattr("mmaccel.comfy.speech._REPORT", -1)
    say(speaker, host, policy=policy("Autoregressive"))
    done = [report[0] for report in host.reports]
    total = 3 * 41
    assert done == sorted(done) and done[0] == 1 and done[-1] == total
    assert {report[1] for report in host.reports} == {total}
    quiet = Host()
    monkeypatch.setattr("mmaccel.comfy.speech._REPORT", 1e9)
    say(speaker, quiet)
    assert len(quiet.reports) == 3  # one an utterance


def test_silence_behind_the_shorter_ones() -> None:
    def utterance(*values: float) -> Utterance:
        sound = torch.tensor(values)
        return Utterance(0, "a", None, 0, sound, 8000, torch.zeros(1).long(), 1, True)

    made = Speech([utterance(0.5, 0.25), utterance(), utterance(1.0)], Stats())
    assert pad_sounds(made).tolist() == [[[0.5, 0.25]], [[0.0, 0.0]], [[1.0, 0.0]]]
    assert pad_sounds(Speech([utterance()], Stats())).tolist() == [[[0.0]]]


def test_a_model_is_loaded_once_and_room_is_made(parts: tuple[Path, Path], tmp_path: Path) -> None:
    host = Host()
    first = load(parts, host).values[0]
    assert load(parts, host).values[0] is first
    weights = sum(
        file.stat().st_size for part in parts for file in part.iterdir()
        if file.suffix == ".safetensors"
    )  # fmt: skip
    ((size, device),) = host.room[:1]
    assert device == "cpu" and 2 * weights <= size < 2.5 * weights and len(host.room) == 1


def test_what_can_be_seen_to_be_wrong_is_refused_before_anything_is_loaded(
    parts: tuple[Path, Path],
) -> None:
    spec, model = NODES["MMAccelLoadSpeechModel"], str(parts[0])
    assert refusal(spec, {"model": model}) is None
    assert refusal(spec, {}) is None  # an id of the hub, which only asking it can tell
    for values, said in (
        ({"model": "none"}, "model: expected a folder"),
        ({"model": model, "codec": "none"}, "codec: expected a folder"),
        ({"model": model, "device": "cuda", "cuda_graphs": "on"}, "device: expected"),
        ({"model": model, "family": "bark"}, "family: expected one of"),
    ):
        refused = refusal(spec, values)
        assert refused is not None and said in refused
    node = NODES["MMAccelGenerateSpeech"]
    for values, said in (
        ({"text": " \n "}, "prompt: expected text to say, received ''"),
        ({"temperature": -0.5}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"repetition_penalty": 0.0}, "penalty: expected a finite number > 0"),
        ({"max_seconds": 4000.0}, "max_seconds: expected a number in 0..3600"),
        ({"batch_size": 0}, "batch_size"),
    ):
        refused = refusal(node, values)
        assert refused is not None and said in refused, values


def test_what_only_the_model_knows_is_said_in_its_node(
    parts: tuple[Path, Path], speaker: OpenSpeaker, tiny_folder: Path
) -> None:
    with pytest.raises(OptionError, match="policy: expected one of"):
        say(speaker, policy=policy("EntropyBounded"))
    with pytest.raises(OptionError, match="positions: expected at most 160"):
        say(speaker, max_seconds=9.0)
    with pytest.raises(UnsupportedModelError, match="model: expected the"):
        load((tiny_folder, parts[1]))


def test_other_files_are_another_model(parts: tuple[Path, Path]) -> None:
    model, codec = map(str, parts)
    before = coded_state(model=model, codec=codec)
    file = next(parts[1].glob("*.safetensors"))
    file.touch()
    assert coded_state(model=model, codec=codec) != before
    assert coded_state(model="owner/name", codec="") == ""
    assert coded_state(model=model, codec="owner/name") == ""  # which only asking the hub tells


def test_first_schema_runs_on_comfyui(
    parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    comfy = install(monkeypatch, with_v3=False)
    loader = v1_class(NODES["MMAccelLoadSpeechModel"])
    node = v1_class(NODES["MMAccelGenerateSpeech"])
    assert node.RETURN_TYPES[0] == "AUDIO"  # type: ignore[attr-defined]
    assert node.INPUT_TYPES()["required"]["seed"][1]["control_after_generate"]  # type: ignore[attr-defined]
    (speaker,) = loader().execute(model=str(parts[0]), codec=str(parts[1]))  # type: ignore[attr-defined]
    audio, _ = node().execute(  # type: ignore[attr-defined]
        speech_model=speaker, text=TEXTS[0], seed=3, max_seconds=SECONDS
    )
    assert set(audio) == {"waveform", "sample_rate"} and audio["waveform"].shape[:2] == (1, 1)
    assert comfy.reports[-1][0] == comfy.reports[-1][1]


def test_third_schema_has_the_native_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, with_v3=True)
    schema = v3_class(NODES["MMAccelGenerateSpeech"]).define_schema()
    assert [output.io_type for output in schema.outputs] == ["AUDIO", "MMACCEL_STATS"]


def test_what_is_chosen_reaches_the_loader_and_nothing_keeps_the_model(
    parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, dict[str, Any]]] = []

    def open_pipe(name: Any, **options: Any) -> Any:
        asked.append((name, options))
        return object()

    monkeypatch.setattr(TextToSpeech, "from_pretrained", open_pipe)
    model, codec = map(str, parts)
    chosen = dict(model=model, codec=codec, dtype="bfloat16", family="orpheus", cuda_graphs="off")
    first = run("LoadSpeechModel", None, **chosen).values[0]
    wanted = dict(device="cpu", dtype=torch.bfloat16, family="orpheus", cuda_graphs=False)
    assert asked == [(model, wanted | {"codec": codec})]
    assert run("LoadSpeechModel", None, **chosen).values[0] is first
    others = [{"dtype": "float16"}, {"family": "llasa"}, {"cuda_graphs": "auto"}]
    kept = [run("LoadSpeechModel", None, **(chosen | other)).values[0] for other in others]
    assert len(asked) == 4 and first not in kept
    next(parts[1].glob("*.safetensors")).touch()  # its files were written again
    assert run("LoadSpeechModel", None, **chosen).values[0] is not first
    gone = ref(first)
    del first
    gc.collect()
    assert gone() is None


def test_seeds_go_round_and_places_and_voices_are_handed_on(
    speaker: OpenSpeaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    plain = TextToSpeech.__call__

    def call(self: TextToSpeech, *texts: Any, **options: Any) -> Any:
        asked.append(options)
        return plain(self, *texts, **options)

    monkeypatch.setattr(TextToSpeech, "__call__", call)
    _, record = say(speaker, seed=2**64 - 2, batch_size=2, voice="  ").values
    assert asked[0]["seed"] == [2**64 - 2, 2**64 - 1, 0]
    assert asked[0]["batch_size"] == 2 and asked[0]["voice"] is None
    text = run("Stats", stats=record).text
    assert f"seed {2**64 - 2}: " in text and "seed 0: " in text and "seed -" not in text
    with pytest.raises(OptionError, match="received 'tara';"):
        say(speaker, voice=" tara ")
