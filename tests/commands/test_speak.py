"""`mmaccel speak --stdout`: sound that is heard while it is decoded."""

from __future__ import annotations

import errno
import io
import sys
import wave
from pathlib import Path
from typing import Any

import pytest

from mmaccel.batch.modalities import Speech
from mmaccel.batch.prompts import Item, check_row
from mmaccel.outputs.sound_files import to_pcm
from tests.fixtures.jobs import SECONDS, TEXTS, Command, pipe
from tests.fixtures.voices import silent

RED, _, LONG = TEXTS["speech"]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command("speech", tmp_path)


def streamed(text: str, seed: int) -> bytes:
    """The samples of a stream."""
    chunks = pipe("speech").stream(text, seed=seed, max_seconds=SECONDS)
    return b"".join(to_pcm(chunk.waveform) for chunk in chunks)


def error_of(capsys: Any) -> str:
    (line,) = [e for e in capsys.readouterr().err.splitlines() if e.startswith("mmaccel: ")]
    return str(line)


@pytest.mark.parametrize("is_silent", [False, True])
def test_stdout_has_a_wav_and_nothing_else(
    command: Command, capfdbinary: Any, is_silent: bool
) -> None:
    wanted = b"" if is_silent else streamed(RED, 4) + streamed(LONG, 5)
    capfdbinary.readouterr()
    if is_silent:
        with silent(pipe("speech")) as quiet, pytest.MonkeyPatch.context() as patch:
            patch.setattr(Speech, "open", lambda self: quiet)
            assert command.run(RED, "--stdout", seed=4) == 0
    else:
        assert command.run(RED, LONG, "--stdout", seed=4) == 0
    captured = capfdbinary.readouterr()
    with wave.open(io.BytesIO(captured.out)) as sound:
        assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (16_000, 1, 2)
        assert sound.readframes(10**9) == wanted == captured.out[44:]
    assert b"real-time factor" in captured.err and not command.out.exists()


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()]
)
def test_a_reader_that_goes_ends_it_and_a_full_disk_is_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: Any, error: BaseException
) -> None:
    class Broken(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            raise error

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(Broken())))
    code = command.run(LONG, RED, "--stdout", seed=4)
    if isinstance(error, BrokenPipeError):
        assert code == 0 and "real-time factor" not in capsys.readouterr().err
    elif isinstance(error, KeyboardInterrupt):
        assert code == 130
        assert "stopped; 0 of 2 utterances were spoken" in error_of(capsys)
    else:
        assert code == 1 and "expected space for the sound, received: No space" in error_of(capsys)


def test_texts_of_several_lengths_are_decoded_together() -> None:
    """The model has positions for 3.2 s, prompts included; each text's maximum fits its own."""
    voices, speech = pipe("speech"), Speech(model="voices")
    texts = ["fox", "a red fox", "red fox", "blue cat", "a fox"]
    items = [Item(check_row({"prompt": text}), k, 0) for k, text in enumerate(texts)]
    widths = {len(voices.speech.encode(text, None)) for text in texts}
    settings = {speech.plan(item, voices) for item in items}
    longest = speech.plan(Item(check_row({"prompt": "seven " * 5}), 0, 0), voices)
    assert len(widths) > 3 and len(settings) == 1
    seconds = dict(settings.pop().options)["max_seconds"]
    assert 0 < dict(longest.options)["max_seconds"] < seconds <= (160 - max(widths)) / 50
