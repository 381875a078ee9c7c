"""Speech made by espeak-ng from phonemes: what `voices` and its codec learn from.

eSpeak NG, https://github.com/espeak-ng/espeak-ng (GPL 3), by its C interface (`speak_lib.h`). It
only makes data: neither the program nor its sound is part of the library. Library and voice data
come with the package `espeakng-loader` (`pip install espeakng-loader`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

SAMPLE_RATE = 16_000
_MADE_RATE = 22_050
_RETRIEVAL = 1  # AUDIO_OUTPUT_RETRIEVAL
_SPEED, _PITCH, _RANGE = 1, 3, 4  # espeakRATE, espeakPITCH, espeakRANGE
_UTF8, _PHONEMES = 1, 0x100  # espeakCHARS_UTF8, espeakPHONEMES
_SEPARATOR = "|"
_STRESSES = "',"
_SPOKEN = {  # words that a sentence does not stress
    "a": "@", "to": "t|@", "for": "f|@|r", "of": "@|v", "and": "@|n|d", "i": "aI", "the": "D|@",
}  # fmt: skip


@dataclass(frozen=True)
class Speaker:
    """A variant of espeak's American English, and the middle of its pitch and speed.

    Attributes:
        variant: name in `espeak-ng-data/voices/!v`.
        pitch: 0..99.
        speed: words a minute.
    """

    variant: str
    pitch: int
    speed: int


SPEAKERS_MADE = {
    "ada": Speaker("f2", 55, 170),
    "ben": Speaker("m3", 40, 165),
    "cleo": Speaker("f5", 70, 180),
    "dan": Speaker("m7", 30, 155),
}
_PITCHES, _SPEEDS, _RANGES = 8, 20, (35, 65)


class Espeak:
    """espeak-ng in this process; `open_espeak` opens the only one, as its state is global."""

    def __init__(self) -> None:
        import espeakng_loader

        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        folder = Path(espeakng_loader.get_data_path()).parent
        self._library.espeak_TextToPhonemes.restype = ctypes.c_char_p
        if self._library.espeak_Initialize(_RETRIEVAL, 0, str(folder).encode(), 0) != _MADE_RATE:
            raise RuntimeError(f"espeak-ng: expected {_MADE_RATE} Hz from the data in {folder}")
        self._library.espeak_SetVoiceByName(b"en-us")
        self._chunks: list[np.ndarray] = []
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
        )
        self._callback = kind(self._receive)
        self._library.espeak_SetSynthCallback(self._callback)

    def _receive(self, samples: ctypes._Pointer[ctypes.c_short], count: int, _: int) -> int:
        if samples and count:
            self._chunks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def phonemes(self, word: str) -> list[str]:
        """Phonemes of a word, a stress mark (', or ,) before the vowel it belongs to."""
        spoken = _SPOKEN.get(word)
        if spoken is None:
            text = ctypes.c_char_p(word.encode())
            mode = ord(_SEPARATOR) << 8
            spoken = self._library.espeak_TextToPhonemes(ctypes.byref(text), _UTF8, mode).decode()
        found = []
        for name in spoken.replace(" ", _SEPARATOR).split(_SEPARATOR):
            while name and name[0] in _STRESSES:
                found.append(name[0])
                name = name[1:]
            if name:
                found.append(name)
        return found

    def speak(
        self, words: Sequence[Sequence[str]], speaker: Speaker, rng: np.random.Generator
    ) -> np.ndarray:
        """Speak phonemes at a pitch, a speed, a loudness and a noise that `rng` draws. The noise
        of espeak's own voices goes on from one utterance to the next.

        Args:
            words: phonemes of each word.
            speaker: who says them.
            rng: draws.

        Returns:
            [samples] int16 at `SAMPLE_RATE`.
        """
        draws = {
            _PITCH: speaker.pitch + rng.integers(-_PITCHES, _PITCHES + 1),
            _SPEED: speaker.speed + rng.integers(-_SPEEDS, _SPEEDS + 1),
            _RANGE: rng.integers(*_RANGES),
        }
        self._library.espeak_SetVoiceByName(f"en-us+{speaker.variant}".encode())
        for parameter, value in draws.items():
            self._library.espeak_SetParameter(parameter, int(value), 0)
        text = " ".join(write_phonemes(word) for word in words)
        data = f"[[{text}]]".encode()
        self._chunks = []
        flags = _UTF8 | _PHONEMES
        self._library.espeak_Synth(data, len(data) + 1, 0, 1, 0, flags, None, None)
        self._library.espeak_Synchronize()
        sound = resample(np.concatenate(self._chunks).astype(np.float64) / 32768)
        sound = _trim(sound, rng)
        peak = np.abs(sound).max()
        sound = sound * (rng.uniform(0.35, 0.7) / peak)
        level = 10 ** (-rng.uniform(42, 52) / 20)
        sound = sound + rng.normal(scale=level, size=len(sound))
        return (sound.clip(-1, 1) * 32767).astype(np.int16)


@cache
def open_espeak() -> Espeak:
    """The espeak-ng of this process."""
    return Espeak()


def write_phonemes(phonemes: Sequence[str]) -> str:
    """Phonemes as espeak reads them: separated, stress marks before their vowel."""
    text = ""
    for name in phonemes:
        text += name if name in _STRESSES else name + _SEPARATOR
    return text.rstrip(_SEPARATOR)


def _trim(sound: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Cut silence at both ends down to short, drawn pauses."""
    loud = np.flatnonzero(np.abs(sound) > 0.01)
    before, after = rng.integers(320, 1280, size=2)
    begin = max(loud[0] - before, 0)
    return sound[begin : loud[-1] + after]


def resample(sound: np.ndarray, rate: int = _MADE_RATE, wanted: int = SAMPLE_RATE) -> np.ndarray:
    """Resample a whole sound by its spectrum, which is cut at half the lower rate."""
    length = round(len(sound) * wanted / rate)
    spectrum = np.fft.rfft(sound)
    kept = length // 2 + 1
    spectrum = np.pad(spectrum[:kept], (0, max(kept - len(spectrum), 0)))
    return np.fft.irfft(spectrum, length) * (length / len(sound))
