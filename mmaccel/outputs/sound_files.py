"""Sound: WAV files with a JSON file next to each, read and written, and WAV in a stream."""

from __future__ import annotations

import struct
import wave
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmaccel.errors import OptionError
from mmaccel.outputs.whole_files import write_with_facts

_FULL = 2**15 - 1  # largest value of 16 bits
MAX_SOUND = 2**27  # samples of all channels: 46 minutes of 48 kHz
_UNKNOWN = 2**32 - 1  # a size in the head of a WAV whose end is not known


def write_sound(file: Path, waveform: Tensor, sample_rate: int, facts: Mapping[str, Any]) -> None:
    """Write a mono WAV of 16 bits, and `facts` under the same name with `.json`; samples `[n]`
    outside -1..1 are clipped.
    """

    def write(path: Path) -> None:
        path.write_bytes(to_wav(waveform, sample_rate))

    write_with_facts(file, facts, write)


def to_pcm(waveform: Tensor) -> bytes:
    """Samples of 16 bits, little-endian, of a waveform `[samples]` float in -1..1."""
    samples = waveform.mul(_FULL).round().clamp(-_FULL, _FULL).short().numpy()
    data: bytes = samples.astype("<i2").tobytes()
    return data


def to_wav(waveform: Tensor, sample_rate: int) -> bytes:
    data = BytesIO()
    with wave.open(data, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(sample_rate)
        sound.writeframes(to_pcm(waveform))
    return data.getvalue()


def read_sound(file: Path) -> tuple[Tensor, int]:
    """A WAV file of 16 bits as `[samples]` float32 in -1..1, the mean of its channels, and its
    sample rate in Hz.
    """
    try:
        with wave.open(str(file), "rb") as sound:
            width, channels, rate = sound.getsampwidth(), sound.getnchannels(), sound.getframerate()
            count = channels * sound.getnframes()
            if width != 2 or not 0 < count <= MAX_SOUND:
                raise ValueError(f"{count} samples of {8 * width} bits")
            data = sound.readframes(count)
    except (OSError, EOFError, ValueError, wave.Error) as error:
        raise OptionError(
            f"sound: expected a WAV file of 1 to {MAX_SOUND} samples of 16 bits, received "
            f"{str(file)!r} ({error or 'it ends too early'}); save it again"
        ) from error
    samples = np.frombuffer(data, "<i2")[: len(data) // (2 * channels) * channels]
    waveform = samples.reshape(-1, channels).mean(1, dtype=np.float32) / (_FULL + 1)
    return torch.from_numpy(waveform), rate


def wav_head(sample_rate: int) -> bytes:
    """What a mono WAV of 16 bits begins with, before samples whose number is not known yet."""
    samples = struct.pack("<HHIIHH", 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    form = b"WAVEfmt " + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", _UNKNOWN) + form + b"data" + struct.pack("<I", _UNKNOWN)
