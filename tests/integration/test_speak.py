"""`mmaccel speak`: the pipeline's sound in WAV files, what they were made from, every bad input."""

from __future__ import annotations

import json
import shutil
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmaccel import Autoregressive, TextToSpeech
from mmaccel.cli import main
from mmaccel.commands import speech_job
from mmaccel.outputs.sound_files import write_sound
from mmaccel.pipelines.model_folder import content_hash
from tests.speech_beds import TEXTS, build_speech

SECONDS = 0.05


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_speech("llasa", tmp_path_factory.mktemp("llasa"))


def speak(parts: tuple[Path, Path], out: Path, *arguments: Any) -> int:
    model, codec = parts
    fixed = ["--model", model, "--codec", codec, "--out", out, "--max-seconds", SECONDS]
    return main([str(argument) for argument in ("speak", *arguments, *fixed)])


def read(file: Path) -> tuple[int, np.ndarray[Any, Any]]:
    with wave.open(str(file)) as sound:
        assert (sound.getnchannels(), sound.getsampwidth()) == (1, 2)
        data = sound.readframes(sound.getnframes())
        return sound.getframerate(), np.frombuffer(data, "<i2")


@pytest.mark.parametrize("policy", [(), ("--policy", "autoregressive"), ("--window", "5")])
def test_files_hold_the_pipelines_sound(
    parts: tuple[Path, Path], tmp_path: Path, policy: tuple[str, ...], capsys: Any
) -> None:
    assert speak(parts, tmp_path, *TEXTS, "--seed", 3, "--batch-size", 2, *policy) == 0
    plain = TextToSpeech.from_pretrained(parts[0], codec=parts[1])(
        TEXTS, policy=Autoregressive(), seed=[3, 4, 5], max_seconds=SECONDS
    )
    files = sorted(tmp_path.glob("*.wav"))
    assert len(files) == 3 and sorted(tmp_path.iterdir()) == sorted(
        [*files, *(file.with_suffix(".json") for file in files)]
    )
    for file, made in zip(files, plain.utterances, strict=True):
        rate, samples = read(file)
        wanted = np.rint(made.waveform.double().numpy() * 32767)
        assert rate == 16000 and np.abs(samples - wanted).max() <= 1
        facts = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
        assert facts["text"] == made.text and facts["seed"] == made.seed
        assert facts["is_finished"] == made.is_finished and facts["tokens"] == len(made.tokens)
        assert facts["weights"] == content_hash(parts[0]) and facts["exactness"] == "bitwise"
        assert facts["temperature"] == 0.8 and facts["repetition_penalty"] == 1.0
        assert facts["policy"] == ("autoregressive" if "--policy" in policy else "jacobi")
    said = capsys.readouterr().out
    assert f"3 utterances, {sum(u.seconds for u in plain.utterances):.1f} s of sound" in said
    assert said.count("was cut at") == sum(not u.is_finished for u in plain.utterances)


def test_only_the_same_utterance_is_overwritten(parts: tuple[Path, Path], tmp_path: Path) -> None:
    for arguments in ((), (), ("--seed", "1"), ("--temperature", "0.5"), ("--batch-size", "2")):
        assert speak(parts, tmp_path, TEXTS[0], *arguments) == 0
    assert len(list(tmp_path.glob("*.wav"))) == 3  # batches do not change what is exact
    for rows in (1, 2):
        arguments = ("--policy", "sjd", "--batch-size", str(rows))
        assert speak(parts, tmp_path, TEXTS[0], *arguments) == 0
    assert len(list(tmp_path.glob("*.wav"))) == 5


def test_another_chat_template_is_another_model(parts: tuple[Path, Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(parts[0], model)
    template = model / "chat_template.jinja"
    for text in ("", "{# changed #}"):
        template.write_text(text + template.read_text(encoding="utf-8"), encoding="utf-8")
        assert speak((model, parts[1]), tmp_path / "out", TEXTS[1]) == 0
    assert len(list((tmp_path / "out").glob("*.wav"))) == 2


BAD = [
    (["--policy", "entropy-bounded"], "policy: expected one of"),
    (["--policy", "nonsense"], "policy: expected one of"),
    (["--window", "0"], "window: expected an integer in 1..4096"),
    (["--voice", "tara"], "voice: expected none for Llasa"),
    (["--temperature", "-1"], "temperature: expected a number >= 0"),
    (["--repetition-penalty", "0"], "penalty: expected a finite number > 0"),
    (["--batch-size", "0"], "--batch-size: expected at least 1"),
    (["--dtype", "int8"], "--dtype: expected one of float32"),
    (["--device", "cuda:9"], "device: expected"),
    (["--cuda-graphs", "on"], "cuda_graphs=True: expected a model on a CUDA device"),
    (["--family", "bark"], "family: expected one of llasa, orpheus"),
    (["--set", "window"], "--set: expected name=value"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=lambda value: str(value)[:30])
def test_wrong_use_is_refused_before_a_folder_is_made(
    parts: tuple[Path, Path], tmp_path: Path, arguments: list[str], said: str, capsys: Any
) -> None:
    out = tmp_path / "out"
    code = speak(parts, out, TEXTS[0], *arguments)
    assert code == (1 if "--cuda-graphs" in arguments else 2) and said in capsys.readouterr().err
    assert not out.exists()


def test_a_missing_model_or_codec_is_named(parts: tuple[Path, Path], capsys: Any) -> None:
    assert main(["speak", "a fox"]) == 2
    assert "--model" in capsys.readouterr().err
    assert main(["speak", "a fox", "--model", "no-such"]) == 2
    assert "model: expected a folder" in capsys.readouterr().err
    assert main(["speak", "a fox", "--model", str(parts[0]), "--codec", "no-such"]) == 2
    assert "codec: expected a folder" in capsys.readouterr().err
    assert main(["speak", "--model", str(parts[0])]) == 2


def test_what_is_said_before_ctrl_c_is_kept(
    parts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    write = speech_job.write_sound
    calls: list[Path] = []

    def once(file: Path, *rest: Any) -> None:
        calls.append(file)
        if len(calls) == 2:
            raise KeyboardInterrupt
        write(file, *rest)

    monkeypatch.setattr(speech_job, "write_sound", once)
    assert speak(parts, tmp_path, *TEXTS) == 130
    assert "kept 1 of 3 utterances" in capsys.readouterr().err
    assert [file.suffix for file in sorted(tmp_path.iterdir())] == [".json", ".wav"]


def test_a_sound_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.wav"
    write_sound(file, torch.tensor([0.0, 0.5, -1.0, 1.0]), 8000, {"text": "ü"})
    rate, samples = read(file)
    assert rate == 8000 and samples.tolist() == [0, 16384, -32767, 32767]
    assert json.loads(file.with_suffix(".json").read_text(encoding="utf-8")) == {"text": "ü"}
    before = file.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wave.Wave_write, "writeframes", fail)
    with pytest.raises(OSError, match="No space"):
        write_sound(file, torch.ones(9), 8000, {})
    assert file.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.wav"]


def test_what_is_heard_otherwise_has_another_name(parts: tuple[Path, Path], tmp_path: Path) -> None:
    """Capitals and full stops, which pictures' names pass over; and another codec."""
    for text in ("blue cat", "blue cat.", "Blue cat", " blue cat "):
        assert speak(parts, tmp_path, text) == 0
    assert len(list(tmp_path.glob("*.wav"))) == 3
    other = build_speech("llasa", tmp_path / "other")[1]
    file = other / "config.json"
    file.write_text(file.read_text(encoding="utf-8") + " ", encoding="utf-8")
    assert speak((parts[0], other), tmp_path, "blue cat") == 0
    assert len(list(tmp_path.glob("*.wav"))) == 4
    facts = [json.loads(f.read_text(encoding="utf-8")) for f in tmp_path.glob("*.json")]
    hashes = {content_hash(parts[1]), content_hash(other)}
    assert {each["codec"] for each in facts} == hashes and len(hashes) == 2


def test_a_length_that_others_shortened_is_in_the_name(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    """Without a length asked for, the longest text decides how much room there is for all."""
    model, codec = map(str, parts)
    fixed = ["--model", model, "--codec", codec, "--out", str(tmp_path)]
    for texts in (["fox"], ["fox", "the grass in the snow"], ["fox", "the grass in the snow"]):
        assert main(["speak", *texts, *fixed]) == 0
    facts = [json.loads(f.read_text(encoding="utf-8")) for f in tmp_path.glob("*.json")]
    # 160 positions; 14 ids beside a text's own; 20 samples of 16000 a second for a code
    seconds = sorted((each["text"], each["max_seconds"]) for each in facts)
    assert seconds == [
        ("fox", (160 - 14 - 5) / 800), ("fox", (160 - 14 - 1) / 800),
        ("the grass in the snow", (160 - 14 - 5) / 800),
    ]  # fmt: skip


def test_long_words_of_wide_letters_fit_a_file_name(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    text = " ".join(letter * 30 for letter in "\U0001d400\U0001d401狐")
    assert speak(parts, tmp_path, text, "--seed", -1, "--policy", "autoregressive") == 0
    (file,) = tmp_path.glob("*.wav")
    assert "\U0001d400" * 15 + "-" + "\U0001d401" * 15 + "-" + "狐" * 20 + "-" in file.name


def test_half_a_character_and_wrong_values_are_one_line(
    parts: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    assert speak(parts, tmp_path / "out", "a \udcff fox") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "in whole characters" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [["  "], ["fox", ""], ["fox", "--seed", 2**64], ["fox", "cat", "--seed", 2**64 - 1],
     ["fox", "--max-seconds", "nan"], ["fox", "--top-k", -1], ["fox", "--min-p", 2],
     ["fox", "--repetition-penalty", 0]],
    ids=str,
)  # fmt: skip
def test_what_no_model_takes_is_refused_before_one_is_loaded(
    arguments: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(speech_job, "open_speaker", load)
    assert main([str(a) for a in ("speak", *arguments, "--model", "x", "--out", tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "expected" in said and "received" in said
    with pytest.raises(AssertionError, match="loaded"):
        main(["speak", "fox", "--model", "x", "--seed", str(2**64 - 1)])


def test_where_the_sound_cannot_be_written_its_facts_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wave.Wave_write, "writeframes", fail)
    with pytest.raises(OSError, match="No space"):
        write_sound(tmp_path / "a.wav", torch.ones(9), 8000, {})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_full_disk_is_said_with_what_was_kept(
    parts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    write, calls = speech_job.write_sound, []

    def once(file: Path, *rest: Any) -> None:
        calls.append(file)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        write(file, *rest)

    monkeypatch.setattr(speech_job, "write_sound", once)
    assert speak(parts, tmp_path, *TEXTS) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(f"mmaccel: --out: expected room for {calls[1].name} in ")
    assert "received No space left on device; kept 1 of 3 utterances; make room" in said
    assert len(list(tmp_path.glob("*.wav"))) == 1


def test_voice_and_dtype_are_told_and_in_the_name(tmp_path: Path) -> None:
    parts = build_speech("orpheus", tmp_path / "parts")
    for own in ((), ("--voice", "leo"), ("--dtype", "bfloat16"),
                ("--dtype", "bfloat16", "--batch-size", 2)):  # fmt: skip
        model, codec = parts
        fixed = ["--model", model, "--codec", codec, "--out", tmp_path, "--max-seconds", 0.003]
        assert main([str(argument) for argument in ("speak", "fox", *own, *fixed)]) == 0
    facts = [json.loads(f.read_text(encoding="utf-8")) for f in tmp_path.glob("*.json")]
    told = sorted((str(f["voice"]), f["dtype"], f["exactness"] == "bitwise") for f in facts)
    assert told == [
        ("None", "bfloat16", False), ("None", "bfloat16", False), ("None", "float32", True),
        ("leo", "float32", True),
    ]  # fmt: skip


def test_what_is_too_loud_is_cut(tmp_path: Path) -> None:
    write_sound(tmp_path / "a.wav", torch.tensor([2.0, -3.0]), 8000, {})
    assert read(tmp_path / "a.wav")[1].tolist() == [32767, -32767]
