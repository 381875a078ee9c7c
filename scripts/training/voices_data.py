"""Pools of speech on disk: sound in one flat file, and who says what in another."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmaccel.demo.voices.words import SPEAKERS, WORDS, make_sentence
from mmaccel.errors import OptionError
from scripts.training.voices_maker import SPEAKERS_MADE, Espeak, open_espeak


@dataclass(frozen=True)
class Pool:
    """Utterances.

    Attributes:
        sound: all, one after the other, int16 at 16 kHz, mapped from disk.
        ends: [N] where each ends.
        sentences: words of each.
        speakers: [N] index in `SPEAKERS` of each.
    """

    sound: np.ndarray
    ends: np.ndarray
    sentences: list[list[str]]
    speakers: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def utterance(self, index: int) -> np.ndarray:
        """[samples] float32 in -1..1."""
        begin = self.ends[index - 1] if index else 0
        return self.sound[begin : self.ends[index]].astype(np.float32) / 32768


def make_lexicon(espeak: Espeak) -> dict[str, list[str]]:
    """Phonemes of every word."""
    return {word: espeak.phonemes(word) for word in WORDS}


def make_pool(work: str | Path, name: str, seed: int, count: int) -> None:
    """Makes `name.sound` and `name.json` in a work folder, where they are not complete.

    Args:
        work: also receives `lexicon.json`.
        name: of the pool.
        seed: fixes sentences, speakers, and how they speak.
        count: utterances.

    Raises:
        OptionError: the folder has a pool of this name and of another size.
    """
    work = Path(work)
    done = work / f"{name}.json"
    if done.exists():
        found = len(json.loads(done.read_text(encoding="utf-8"))["ends"])
        if found != count:
            raise OptionError(
                f"utterances: expected {found}, as {done} has them, received {count}; delete "
                f"{name}.* to make others"
            )
        return
    espeak = open_espeak()
    lexicon = make_lexicon(espeak)
    (work / "lexicon.json").write_text(json.dumps(lexicon), encoding="utf-8")
    ends, sentences, speakers = [], [], []
    total = 0
    with (work / f"{name}.sound").open("wb") as file:
        for index in range(count):
            sentence = make_sentence(seed, index)
            rng = np.random.default_rng((seed, index, 1))
            speaker = int(rng.integers(len(SPEAKERS)))
            words = [lexicon[word] for word in sentence]
            sound = espeak.speak(words, SPEAKERS_MADE[SPEAKERS[speaker]], rng)
            file.write(sound.tobytes())
            total += len(sound)
            ends.append(total)
            sentences.append(list(sentence))
            speakers.append(speaker)
    made: dict[str, Any] = {"ends": ends, "sentences": sentences, "speakers": speakers}
    partial = done.with_suffix(".partial")
    partial.write_text(json.dumps(made), encoding="utf-8")
    partial.replace(done)


def open_pool(work: str | Path, name: str) -> Pool:
    """Opens what `make_pool` wrote."""
    work = Path(work)
    found = json.loads((work / f"{name}.json").read_text(encoding="utf-8"))
    sound = np.memmap(work / f"{name}.sound", dtype=np.int16, mode="r")
    return Pool(sound, np.array(found["ends"]), found["sentences"], np.array(found["speakers"]))
