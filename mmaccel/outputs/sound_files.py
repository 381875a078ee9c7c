"""Sound files: WAV, and next to each a JSON file that says how it was generated."""

from __future__ import annotations

import wave
from collections.abc import Mapping
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
    samples = waveform.mul(_FULL).round().clamp(-_FULL, _FULL).short().numpy()

    def write(path: Path) -> None:
        with wave.open(str(path), "wb") as sound:
            sound.setnchannels(1)
            sound.setsampwidth(2)
            sound.setframerate(sample_rate)
            sound.writeframes(samples.astype("<i2").tobytes())

    write_with_facts(file, facts, write)
