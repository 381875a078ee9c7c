"""What `voices` learns from: speech made by espeak-ng from phonemes, in pools on disk.

eSpeak NG, https://github.com/espeak-ng/espeak-ng (GPL 3), by its C interface (`speak_lib.h`). It
only makes data: neither the program nor its sound is part of the library. Library and voice data
come with the package `espeakng-loader` (`pip install espeakng-loader`).
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scripts.training.voices_words import SPEAKERS, WORDS, make_sentence

SAMPLE_RATE = 16_000
SPEAKERS_MADE = {  # variant of espeak's American English, and the middles of pitch and speed
    "ada": ("f2", 55, 170),
    "ben": ("m3", 40, 165),
    "cleo": ("f5", 70, 180),
    "dan": ("m7", 30, 155),
}
_PITCHES, _SPEEDS, _RANGES = 8, 20, (35, 65)  # around the middles
_MADE_RATE = 22_050
_RETRIEVAL = 1  # AUDIO_OUTPUT_RETRIEVAL
_SPEED, _PITCH, _RANGE = 1, 3, 4  # espeakRATE, espeakPITCH, espeakRANGE
_UTF8, _PHONEMES = 1, 0x100  # espeakCHARS_UTF8, espeakPHONEMES
_SEPARATOR = "|"
_STRESSES = "',"
_SPOKEN = {  # words that a sentence does not stress
    "a": "@", "to": "t|@", "for": "f|@|r", "of": "@|v", "and": "@|n|d", "i": "aI", "the": "D|@",
}  # fmt: skip


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
        for mark in _STRESSES:
            spoken = spoken.replace(mark, f"{mark}{_SEPARATOR}")
        return [name for name in spoken.replace(" ", _SEPARATOR).split(_SEPARATOR) if name]

    def speak(
        self, words: Sequence[Sequence[str]], speaker: str, rng: np.random.Generator
    ) -> np.ndarray:
        """Phonemes of words as sound [samples] int16, at a pitch, a speed, a loudness and a noise
        that `rng` draws. The noise of espeak's own voices goes on from one to the next.
        """
        variant, pitch, speed = SPEAKERS_MADE[speaker]
        draws = {
            _PITCH: pitch + rng.integers(-_PITCHES, _PITCHES + 1),
            _SPEED: speed + rng.integers(-_SPEEDS, _SPEEDS + 1),
            _RANGE: rng.integers(*_RANGES),
        }
        self._library.espeak_SetVoiceByName(f"en-us+{variant}".encode())
        for parameter, value in draws.items():
            self._library.espeak_SetParameter(parameter, int(value), 0)
        data = f"[[{' '.join(map(write_phonemes, words))}]]".encode()
        self._chunks = []
        flags = _UTF8 | _PHONEMES
        self._library.espeak_Synth(data, len(data) + 1, 0, 1, 0, flags, None, None)
        self._library.espeak_Synchronize()
        sound = resample(np.concatenate(self._chunks).astype(np.float64) / 32768)
        loud = np.flatnonzero(np.abs(sound) > 0.01)
        before, after = rng.integers(320, 1280, size=2)  # pauses
        sound = sound[max(loud[0] - before, 0) : loud[-1] + after]
        sound = sound * (rng.uniform(0.35, 0.7) / np.abs(sound).max())
        level = 10 ** (-rng.uniform(42, 52) / 20)
        sound = sound + rng.normal(scale=level, size=len(sound))
        return (sound.clip(-1, 1) * 32767).astype(np.int16)


@cache
def open_espeak() -> Espeak:
    """The espeak-ng of this process."""
    return Espeak()


def write_phonemes(phonemes: Sequence[str]) -> str:
    """Phonemes as espeak reads them: separated, stress marks before their vowel."""
    text = "".join(name if name in _STRESSES else name + _SEPARATOR for name in phonemes)
    return text.rstrip(_SEPARATOR)


def resample(sound: np.ndarray, rate: int = _MADE_RATE, wanted: int = SAMPLE_RATE) -> np.ndarray:
    """Resample a whole sound by its spectrum, which is cut at half the lower rate."""
    length = round(len(sound) * wanted / rate)
    spectrum = np.fft.rfft(sound)
    kept = length // 2 + 1
    spectrum = np.pad(spectrum[:kept], (0, max(kept - len(spectrum), 0)))
    return np.fft.irfft(spectrum, length) * (length / len(sound))


@dataclass(frozen=True)
class Pool:
    """Utterances.

    Attributes:
        sound: all, one after the other, int16 at 16 kHz, mapped from disk.
        ends: [N] where each ends.
        sentences: words of each.
        speakers: [N] index in `SPEAKERS` of each.
        lexicon: phonemes of every word.
    """

    sound: np.ndarray
    ends: np.ndarray
    sentences: list[list[str]]
    speakers: np.ndarray
    lexicon: dict[str, list[str]]

    def __len__(self) -> int:
        return len(self.ends)

    def utterance(self, index: int) -> Tensor:
        """[samples] float32 in -1..1."""
        begin = self.ends[index - 1] if index else 0
        return torch.from_numpy(self.sound[begin : self.ends[index]].astype(np.float32) / 32768)


def open_pool(work: Path, name: str, seed: int, count: int) -> Pool:
    """The pool of `name.sound` and `name.json` in a work folder, made where they are missing;
    `seed` fixes sentences, speakers, and how they speak.
    """
    done = work / f"{name}.json"
    if not done.exists():
        _make_pool(work, name, seed, count)
    found: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
    found |= {key: np.array(found[key]) for key in ("ends", "speakers")}
    return Pool(np.memmap(work / f"{name}.sound", dtype=np.int16, mode="r"), **found)


def _make_pool(work: Path, name: str, seed: int, count: int) -> None:
    espeak = open_espeak()
    lexicon = {word: espeak.phonemes(word) for word in WORDS}
    work.mkdir(parents=True, exist_ok=True)
    made: dict[str, Any] = {"ends": [], "sentences": [], "speakers": [], "lexicon": lexicon}
    total = 0
    with (work / f"{name}.sound").open("wb") as file:
        for index in range(count):
            sentence = make_sentence(seed, index)
            rng = np.random.default_rng((seed, index, 1))
            speaker = int(rng.integers(len(SPEAKERS)))
            sound = espeak.speak([lexicon[word] for word in sentence], SPEAKERS[speaker], rng)
            file.write(sound.tobytes())
            total += len(sound)
            for key, value in (("ends", total), ("sentences", sentence), ("speakers", speaker)):
                made[key].append(value)
    partial = work / f"{name}.partial"
    partial.write_text(json.dumps(made), encoding="utf-8")
    partial.replace(work / f"{name}.json")
