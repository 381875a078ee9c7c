"""`mmaccel speak`: prompt files, and sound that is heard while it is decoded."""

from __future__ import annotations

import errno
import io
import json
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmaccel import TextToSpeech
from mmaccel.batch.prompts import Item, check_row
from mmaccel.batch.speech import SpeechSetup
from mmaccel.cli import main
from mmaccel.outputs.sound_files import to_pcm, to_wav
from mmaccel.pipelines.models.voices import VoicesSpeech
from tests.fixtures.prompt_files import make_in_parts, read_files, stop_at, write_rows
from tests.fixtures.voices import build_voices, silent

LONG_TEXT = "A red fox. Blue cat, a red fox a blue cat; seven"
ROWS = [
    {"id": "a", "prompt": "a red fox", "n": 2},
    {"id": "b", "prompt": LONG_TEXT, "voice": "ben", "seed": 7},
    {"id": "c", "prompt": "blue cat", "seed": 4, "temperature": 0.9, "policy": "autoregressive"},
    {"id": "d", "prompt": "blue cat", "seed": 4, "params": {"window": 4}},
]
SECONDS = 0.4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_voices(tmp_path_factory.mktemp("voices"))


@pytest.fixture(scope="module")
def pipe(model: Path) -> TextToSpeech:
    return TextToSpeech.from_pretrained(model)


@pytest.fixture(autouse=True)
def _load_once(pipe: TextToSpeech, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextToSpeech, "from_pretrained", lambda *_, **__: pipe)


def speak(model: Path, *arguments: object) -> int:
    fixed = ["--model", model, "--max-seconds", SECONDS]
    return main(["speak", *map(str, arguments), *map(str, fixed)])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_rows(tmp_path, ROWS)


def test_a_prompt_file_is_spoken_once_whatever_its_parts(
    model: Path, pipe: TextToSpeech, prompts: Path, tmp_path: Path
) -> None:
    job = ["--prompts", prompts, "--seed", 5]
    made, in_shards, alone = make_in_parts(
        lambda out, *more: speak(model, *job, "--out", out, *more), tmp_path, ".wav"
    )
    assert in_shards == made and alone == made
    assert len(made) == 5 and {"b_0_7.wav", "c_0_4.wav", "d_0_4.wav"} < set(made)
    said = pipe(LONG_TEXT, seed=[7], voice="ben", max_seconds=SECONDS)[0]
    assert made["b_0_7.wav"] == to_wav(said.waveform, 16_000)
    said = pipe("blue cat", seed=[4], temperature=0.9, max_seconds=SECONDS)[0]
    assert made["c_0_4.wav"] == to_wav(said.waveform, 16_000)
    facts = json.loads((tmp_path / "all" / "b_0_7.json").read_text(encoding="utf-8"))
    assert (facts["prompt"], facts["voice"], facts["max_seconds"]) == (LONG_TEXT, "ben", SECONDS)
    lines = (tmp_path / "all" / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    records = {record["file"]: record for record in map(json.loads, lines)}
    assert records["b_0_7.wav"]["voice"] == "ben" and records["c_0_4.wav"]["seconds"] > 0


def test_a_prompt_file_goes_on_where_it_was_stopped(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    job = ["--prompts", prompts, "--seed", 5, "--batch-size", 1, "--out", out]
    with stop_at(3, VoicesSpeech):
        assert speak(model, *job) == 130
    n = len(read_files(out, ".wav"))  # one of them may be without words, which is not rendered
    assert 2 <= n < 5 and f"{n} utterances generated" in capsys.readouterr().err
    assert not list(out.glob(".*.tmp"))
    assert speak(model, *job, "--resume") == 0
    assert f"{n} before" in capsys.readouterr().err
    assert len(read_files(out, ".wav")) == 5
    assert speak(model, *job, "--resume", "--temperature", 0.5) == 2
    assert "received others for" in capsys.readouterr().err


def test_wrong_rows_are_named_before_any_work(model: Path, tmp_path: Path, capsys: Any) -> None:
    """What is said of each stands in `tests/messages/voices.py`."""
    rows = [{"prompt": "red"}, {"prompt": "foxx"}, {"prompt": "red", "size": 64}]
    file = write_rows(tmp_path, rows)
    assert speak(model, "--prompts", file, "--seed", 0, "--out", tmp_path / "out") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "line 2: " in line and "line 3: " in line and "line 1: " not in line
    assert not read_files(tmp_path / "out", ".wav")


def parts_of(pipe: TextToSpeech, text: str, seed: int) -> bytes:
    """The samples of a stream."""
    chunks = pipe.stream(text, seed=seed, max_seconds=SECONDS)
    return b"".join(to_pcm(chunk.waveform) for chunk in chunks)


def test_stdout_has_a_wav_and_nothing_else(
    model: Path, pipe: TextToSpeech, tmp_path: Path, capfdbinary: Any
) -> None:
    wanted = parts_of(pipe, "a red fox", 4) + parts_of(pipe, LONG_TEXT, 5)
    capfdbinary.readouterr()
    out = tmp_path / "out"
    assert speak(model, "a red fox", LONG_TEXT, "--stdout", "--seed", 4, "--out", out) == 0
    captured = capfdbinary.readouterr()
    with wave.open(io.BytesIO(captured.out)) as sound:
        assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (16_000, 1, 2)
        assert sound.readframes(10**9) == wanted
    assert captured.out[44:] == wanted and not out.exists()
    assert b"2 utterances" in captured.err and b"real-time factor" in captured.err


def test_stdout_has_a_wav_also_without_sound(
    model: Path, pipe: TextToSpeech, capfdbinary: Any
) -> None:
    capfdbinary.readouterr()
    with silent(pipe):
        assert speak(model, "a red fox", "--stdout", "--seed", 4) == 0
    captured = capfdbinary.readouterr()
    with wave.open(io.BytesIO(captured.out)) as sound:
        assert sound.getframerate() == 16_000 and sound.readframes(10**9) == b""
    assert b"real-time factor 0.00" in captured.err


def report_of(capsys: Any) -> str:
    """The one line that is no progress."""
    lines = [line for line in capsys.readouterr().err.splitlines() if "%" not in line]
    (line,) = filter(str.strip, lines)
    return str(line)


class Device:
    """The part of `sounddevice` that is used, whose stream keeps what it plays.

    Attributes:
        played: samples so far.
        state: what happened to the stream.
        most: raises `failure` when so many bytes were played.
        broken: calls of the stream that raise `PortAudioError`.
    """

    class PortAudioError(Exception):
        """No device."""

    def __init__(self, most: int = 10**9) -> None:
        self.played = b""
        self.state: list[str] = []
        self.most = most
        self.failure: type[BaseException] = KeyboardInterrupt
        self.broken: tuple[str, ...] = ()

    def RawOutputStream(self, **options: Any) -> Any:  # noqa: N802
        assert options == {"samplerate": 16_000, "channels": 1, "dtype": "int16"}
        names = ("start", "stop", "abort", "close")
        ends = {name: lambda name=name: self.change(name) for name in names}
        return SimpleNamespace(write=self.write, **ends)

    def change(self, name: str) -> None:
        self.state.append(name)
        if name in self.broken:
            raise self.PortAudioError("unplugged")

    def write(self, data: bytes) -> None:
        self.played += data
        if len(self.played) > self.most:
            raise self.failure("unplugged")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    found = Device()
    monkeypatch.setitem(sys.modules, "sounddevice", found)  # type: ignore[arg-type]
    yield found


def test_it_is_played_to_its_end(
    model: Path, pipe: TextToSpeech, tmp_path: Path, device: Device, capsys: Any
) -> None:
    wanted = parts_of(pipe, LONG_TEXT, 4)
    assert speak(model, LONG_TEXT, "--play", "--seed", 4, "--out", tmp_path / "out") == 0
    assert device.played == wanted and device.state == ["start", "stop", "close"]
    assert not (tmp_path / "out").exists() and "1 utterance" in capsys.readouterr().out


def test_ctrl_c_ends_the_sound_at_once(
    model: Path, pipe: TextToSpeech, device: Device, capsys: Any
) -> None:
    device.most = 4000
    assert speak(model, LONG_TEXT, "red", "--play", "--seed", 4) == 130
    assert len(device.played) <= 4000 + 3200 and device.state == ["start", "abort", "close"]
    assert "stopped; 0 of 2 utterances were spoken" in capsys.readouterr().err
    assert len(pipe("red", max_seconds=0.1)) == 1  # the model is free


@pytest.mark.parametrize(
    ("most", "broken", "state"),
    [
        (4000, ("abort", "close"), ["start", "abort", "close"]),
        (10**9, ("stop",), ["start", "stop", "abort", "close"]),
        (10**9, ("start",), ["start", "abort", "close"]),
    ],
    ids=["write", "stop", "start"],
)
def test_a_loudspeaker_that_fails_is_closed_in_one_line(
    model: Path, device: Device, capsys: Any, most: int, broken: tuple[str, ...], state: list[str]
) -> None:
    device.most = most
    device.broken = broken
    device.failure = device.PortAudioError
    assert speak(model, "red", "--play", "--seed", 4) == 1
    line = report_of(capsys)
    assert "a loudspeaker that plays 16000 Hz, received: unplugged" in line
    assert device.state == state


def test_a_machine_that_cannot_play_says_so_before_work(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    assert speak(model, "red", "--play") == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "pip install mmaccel[play]" in line


class Broken(io.RawIOBase):
    """A file that takes nothing.

    Args:
        error: which it raises.
    """

    def __init__(self, error: OSError) -> None:
        self._error = error

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        raise self._error


def test_a_reader_that_goes_ends_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Broken(BrokenPipeError())
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(gone)))
    assert speak(model, LONG_TEXT, "--stdout", "--seed", 4) == 0


def test_a_full_disk_is_one_line(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    full = Broken(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(full)))
    assert speak(model, "red", "--stdout", "--seed", 4) == 1
    line = report_of(capsys)
    assert "expected space for the sound, received: No space left on device; free" in line


def test_texts_of_several_lengths_are_decoded_together(pipe: TextToSpeech) -> None:
    """The model has positions for 3.2 s, prompts included; each text's maximum fits its own."""
    setup = SpeechSetup("voices", Path("out"))
    texts = ["fox", "a red fox", "red fox", "blue cat", "a fox"]
    items = [Item(check_row({"prompt": text}), k, 0) for k, text in enumerate(texts)]
    widths = {len(pipe.speech.encode(text, None)) for text in texts}
    settings = {setup.plan(item, pipe) for item in items}
    longest = setup.plan(Item(check_row({"prompt": "seven " * 5}), 0, 0), pipe)
    assert len(widths) > 3 and len(settings) == 1
    seconds = dict(settings.pop().options)["max_seconds"]
    assert 0 < dict(longest.options)["max_seconds"] < seconds <= (160 - max(widths)) / 50
    assert len(pipe(texts[:2], seed=0, max_seconds=seconds)) == 2
