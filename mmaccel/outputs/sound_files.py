"""Sound files: WAV, and next to each a JSON file that says how it was generated."""

from __future__ import annotations

import wave
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from torch import Tensor

from mmaccel.outputs.whole_files import write_with_facts

_FULL = 2**15 - 1  # largest value of 16 bits


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
