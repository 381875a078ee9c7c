"""Sound files: WAV, read and written, with a JSON file next to each that says how it was made."""

from __future__ import annotations

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


def write_sound(file: Path, waveform: Tensor, sample_rate: int, facts: Mapping[str, Any]) -> None:
    """Write a mono WAV of 16 bits, and `facts` under the same name with `.json`.

    Args:
        file: the final name; see `write_with_facts`.
        waveform: `[samples]` float in -1..1; samples outside are clipped.
        sample_rate: in Hz.
        facts: ready for JSON.
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
    """The bytes of the file that `write_sound` writes."""
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

    Raises:
        OptionError: no such file, another format, more than `MAX_SOUND` samples, or none.
    """
    try:
        with wave.open(str(file), "rb") as sound:
            width, channels, rate = sound.getsampwidth(), sound.getnchannels(), sound.getframerate()
            count = sound.getnframes()
            data = sound.readframes(count) if channels * count <= MAX_SOUND else b""
    except (OSError, EOFError, ValueError, wave.Error) as error:
        raise OptionError(
            f"sound: expected a WAV file, received {str(file)!r} ({error or 'it ends too early'}); "
            "save it again as WAV of 16 bits"
        ) from error
    if width != 2:
        raise OptionError(
            f"sound: expected 16 bits a sample, received {8 * width} in {str(file)!r}; save it "
            "again as WAV of 16 bits"
        )
    samples = np.frombuffer(data, "<i2")[: len(data) // (2 * channels) * channels]
    if not len(samples):
        raise OptionError(
            f"sound: expected 1 to {MAX_SOUND} samples, received {channels * count} in "
            f"{str(file)!r}; cut it, or take it out"
        )
    waveform = samples.reshape(-1, channels).mean(1, dtype=np.float32) / (_FULL + 1)
    return torch.from_numpy(waveform), rate
